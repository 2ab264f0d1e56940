"""The encoder of SigLIP (Zhai et al., "Sigmoid Loss for Language Image Pre-Training", 2023), which many models use."""

from __future__ import annotations

from fd_core.errors import ModelError
from fd_core.models.families.contract import ImageSpec, MergerSpec, RopeSpec, Traits, VectorSpec
from fd_core.models.families.images.qwen import rope_of_patches
from fd_core.models.families.spec import tower_spec
from fd_core.models.loading.config import ModelConfig

_NAMES = {
    "input_layernorm": "layer_norm1",
    "post_attention_layernorm": "layer_norm2",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}


def siglip_spec(
    config: ModelConfig, name: str, merger: MergerSpec, merge: int, *, most_patches: int | None = None
) -> ImageSpec:
    """Return the encoder of `vision_config`, whose tensors begin with `name`.

    With `most_patches` grids of all shapes have up to so many, rope by row and column, and interpolated positions.

    Raises `ModelError` if there is none, or its sizes contradict each other.
    """
    part = config.part("vision_config")
    if part is None:
        raise ModelError(f"{config.origin}: vision_config is missing")
    part = part.filled({"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "num_channels": 3}, {})
    size, hidden = part.count("patch_size"), part.count("hidden_size")
    if part.count("num_channels") != 3:
        raise ModelError(f"{config.origin}: vision_config.num_channels must be 3")
    side = part.count("image_size") // size
    if side < 1 or (side % merge and most_patches is None):
        raise ModelError(
            f"{config.origin}: {side} patches in a row of an image cannot be merged by {merge}",
            hint="image_size and patch_size of vision_config are inconsistent",
        )
    names = {
        **_NAMES,
        "model.layers": f"{name}.encoder.layers",
        "model.norm": f"{name}.post_layernorm",
    }
    table = f"{name}.embeddings.position_embedding"
    rope = RopeSpec(()) if most_patches is None else rope_of_patches(part, hidden, part.count("num_attention_heads"))
    traits = Traits(
        rope=lambda layer: rope,
        causal=False,
        layer_norm=True,
        norm_bias=True,
        eps="layer_norm_eps",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated=False,
        names=names,
        positions=table if most_patches is None else "",
    )
    patch = f"{name}.embeddings.patch_embedding"
    return ImageSpec(
        patch=VectorSpec(f"{patch}.weight", (hidden, 3, size, size)),
        patch_bias=VectorSpec(f"{patch}.bias", (hidden,)),
        tower=tower_spec(part, traits, most_patches or side**2),
        most_patches=most_patches or side**2,
        side=side,
        positions=None if most_patches is None else VectorSpec(f"{table}.weight", (side**2, hidden)),
        merge=merge,
        merger=merger,
    )
