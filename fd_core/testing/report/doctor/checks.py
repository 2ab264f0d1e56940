"""The operations of the contract, each with the cases of the kit that call it and the largest ones, which are timed."""

from __future__ import annotations

from typing import Final, NamedTuple, get_args

from fd_core.ops.contract import Ops, RecurrentRule
from fd_core.testing.axes import pools, products, routing, sampling
from fd_core.testing.axes.latent import LATENT
from fd_core.testing.axes.layers import LAYERS
from fd_core.testing.axes.parts import Part
from fd_core.testing.axes.recurrent import RECURRENT


class OpCheck(NamedTuple):
    """Operations that are examined together, in the cases of a part of the kit."""

    operations: tuple[str, ...]
    """Methods of `Ops`, or of its KV cache."""
    part: Part[Ops]
    large: tuple[str, ...]
    """Cases in which the operations are timed; together they call all of them."""
    asks: tuple[str, ...] = ()
    """Abilities, which a backend may lack, that these cases need in addition to all of the part."""

    @property
    def label(self) -> str:
        """The operations, for users."""
        return ", ".join(self.operations)


_PRODUCT: Final = "rows=64,inputs=1024,outputs=1408,parts=2"
_HEAD: Final = "rows=64,vocabulary=5003,hidden=1024"
_LAYER: Final = "decodes=33,chunk=31,context=1025,kv_heads=4,head_dim=64,hidden=1024,inner=1408,block_size=32"
_EXPERTS: Final = "tokens=64,experts=4,hidden=1024,inner=704"

CHECKS: Final = (
    OpCheck(("from_host", "to_host"), products.TRANSFER, ("size=1000003",)),
    OpCheck(("embedding",), products.EMBEDDING, ("rows=64,vocabulary=5003,hidden=1024",)),
    OpCheck(("rms_norm",), products.NORM, ("rows=64,width=1024",)),
    OpCheck(("activate",), products.ACTIVATE, ("rows=64,width=1408",)),
    OpCheck(
        ("linear", "gated_linear", "gate_up", "gate"),
        products.LINEAR,
        (_PRODUCT, f"{_PRODUCT},gated=silu", f"{_PRODUCT},gated=silu,apart=true"),
    ),
    OpCheck(("gate_heads", "gated_attention"), products.GATE, ("rows=64,width=1024", "rows=64,width=1024,fused=true")),
    OpCheck(("lora",), routing.LORA, ("rows=64,inputs=1024,outputs=1024",)),
    OpCheck(("logits_of", "logits", "tied_head"), products.HEAD, (_HEAD, f"{_HEAD},tied=true,rows_of=some")),
    OpCheck(("split_heads", "rope"), pools.ROPE, ("tokens=64,heads=16,head_dim=64",)),
    OpCheck(
        ("allocate_kv", "write_kv", "export_blocks", "import_blocks"), pools.KV, ("tokens=64,kv_heads=4,head_dim=64",)
    ),
    OpCheck(("moe", "moe_residual"), routing.MOE, (_EXPERTS, f"{_EXPERTS},fused=true")),
    OpCheck(("sample",), sampling.SAMPLE, ("rows=16,vocabulary=70001",)),
    OpCheck(("penalize",), sampling.PENALIZE, ("rows=16,vocabulary=70001",)),
    OpCheck(("mask_logits",), sampling.MASK, ("rows=16,vocabulary=70001",)),
    OpCheck(("logprobs", "ranks"), sampling.SCORES, ("rows=16,vocabulary=70001",)),
    OpCheck(("verify",), sampling.VERIFY, ("rows=64",)),
    OpCheck(
        ("gather_rows", "add_at", "write_rows", "add"),
        sampling.CELLS,
        ("array=counts,rows=64,width=20001", "array=activations,rows=64,width=1003,again=true"),
        ("primitives",),
    ),
    OpCheck(
        ("attention_inputs", "attention", "project_residual", "settle", "mlp_inputs", "plain_mlp_inputs"),
        LAYERS,
        (_LAYER, f"{_LAYER},ungated=relu2"),
    ),
    OpCheck(("paged_attention",), LAYERS, (f"{_LAYER},composed=true",), ("paged_kv",)),
    OpCheck(("latent_attention",), LATENT, ("decodes=33,chunk=17,heads=16,latent=64",)),
    OpCheck(
        ("recurrence", "recur"),
        RECURRENT,
        ("rows=5,chunk=40", *(f"rule={rule},rows=5,chunk=40,composed=true" for rule in get_args(RecurrentRule))),
    ),
)
"""`CELLS` has all operations on rows and cells; `LAYERS` calls the fusions, and if composed what they consist of."""
