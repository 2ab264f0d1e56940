"""Families with one deliberate mistake each, and the test that detects it."""

from dataclasses import replace
from typing import ClassVar

from fd_core.models.families.builtin.ernie import Ernie
from fd_core.models.families.builtin.gemma import Gemma3
from fd_core.models.families.builtin.granite import Granite
from fd_core.models.families.builtin.llama import Llama, Mistral
from fd_core.models.families.builtin.qwen import Qwen2, Qwen3, Qwen3Moe
from fd_core.models.families.contract import DenseLayer, Family, Gguf, OutputLayers
from fd_core.models.families.spec import Traits, head_dim_of, rope_spec

DEFAULTS = "test_absent_fields_have_their_defaults"
FIELDS = "test_cases_differ_from_defaults"
GGUF = "test_gguf_file_is_the_same_model"
LOGITS = "test_logits_are_those_of_the_reference"

WRONG: dict[type[Family], tuple[str, str]] = {}
"""Family to the test that fails, and words of its failure."""


def found_by(test, words):
    def register(cls):
        WRONG[cls] = test, words
        return cls

    return register


@found_by(DEFAULTS, "without rope_parameters is not read as with")
class DefaultBaseOfLlama(Ernie):
    def traits(self, config):
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0, interleaved=True)
        return replace(super().traits(config), rope=lambda layer: rope)


@found_by(LOGITS, "the first wrong position is 7")
class WindowOffByOne(Mistral):
    cases = {"window": {"sliding_window": 7}}  # noqa: RUF012

    def traits(self, config):
        window = config.count("sliding_window") + 1
        return replace(super().traits(config), window=lambda layer: window)


@found_by(DEFAULTS, "without layer_types is not read as with")
class PatternOfFour(Gemma3):
    """Every fourth layer has full attention in configs that do not list the layers."""

    def traits(self, config):
        if config.values.get("layer_types") is None:
            config = replace(config, values={**config.values, "sliding_window_pattern": 4})
        return super().traits(config)


@found_by("test_ropes_are_those_of_the_reference", "'rope_type': 'yarn'.*'beta_fast': .*are off by")
class YarnOfThePaper(Qwen2):
    """The constants of YaRN are those of the paper, whatever the config has."""

    def traits(self, config):
        part = config.values["rope_parameters"]
        kept = {name: part[name] for name in part if not name.startswith(("beta", "mscale", "attention_factor"))}
        return super().traits(replace(config, values={**config.values, "rope_parameters": kept}))


@found_by("test_tensors_are_checked_by_name", r"'model.layers.0.self_attn.k_proj.bias' is not expected")
class BiasesOfLlama(Qwen2):
    def traits(self, config):
        return replace(super().traits(config), qkv_bias=config.flag("attention_bias"))


@found_by(LOGITS, "are off by")
class AlwaysNormalizesExperts(Qwen3Moe):
    def traits(self, config):
        traits = super().traits(config)

        def moe(layer, prefix, norm):
            found = traits.moe(layer, prefix, norm)
            return None if found is None else replace(found, normalize=True)

        return replace(traits, moe=moe)


@found_by("test_tensors_are_checked_by_name", "two parts of the model read model.layers.0.mlp.experts.0.down_proj")
class AllExpertsAreTheFirst(Qwen3Moe):
    def traits(self, config):
        traits = super().traits(config)

        def moe(layer, prefix, norm):
            found = traits.moe(layer, prefix, norm)
            return None if found is None else replace(found, experts=found.experts[:1] * len(found.experts))

        return replace(traits, moe=moe, ignored=(r"\.experts\.",))


@found_by(LOGITS, "are off by")
class ScalesByHeadSize(Gemma3):
    def traits(self, config):
        return replace(super().traits(config), scale=None)


@found_by(GGUF, "has other values in GGUF")
class SwapsNormsOfGguf(Gemma3):
    gguf = {  # noqa: RUF012
        "gemma3": Gguf(
            config=Gemma3.gguf["gemma3"].config,
            tensors={
                "ffn_norm": "post_feedforward_layernorm",
                "post_attention_norm": "post_attention_layernorm",
                "post_ffw_norm": "pre_feedforward_layernorm",
            },
            norm_offset=1.0,
        )
    }


@found_by(GGUF, "transformers reads other values of blk.0.attn_[qk].weight in llama")
class ForgetsPermutationOfGguf(Llama):
    gguf = {"llama": Gguf(config=Llama.gguf["llama"].config)}  # noqa: RUF012


@found_by("test_gguf_files_have_the_rows_of_the_converter", "its converter permutes the rows of q and k")
class ForgetsPermutationOfGranite(Granite):
    """Garbage from every file, which only the family itself converts back: `transformers` does not read them."""

    gguf: ClassVar = {"granite": replace(Granite.gguf["granite"], permuted=False)}


@found_by(GGUF, "the GGUF file describes another model: .*router.* is 8, expected 6")
class ConstantExpertsOfGguf(Qwen3Moe):
    gguf = {  # noqa: RUF012
        "qwen3moe": Gguf(
            config=lambda shape, tensors: (
                Qwen3Moe.gguf["qwen3moe"].config(shape, tensors) | {"num_experts": 8, "num_experts_per_tok": 8}
            )
        )
    }


class _Hidden(dict):
    """Config of which only a part is read."""

    def __init__(self, values, shown):
        super().__init__(shown)
        self.values_of = values

    def get(self, field, default=None):
        return self.values_of.get(field, default) if field in self else default


@found_by(DEFAULTS, "a description depends on earlier ones")
class RemembersRope(Llama):
    rope = None

    def traits(self, config):
        self.rope = self.rope or rope_spec(config, head_dim_of(config), theta=10_000.0)
        return replace(super().traits(config), rope=lambda layer: self.rope)


@found_by(FIELDS, "no case has another value of .*attention_bias=False")
class TestsNoBiases(Llama):
    cases = {"plain": {}}  # noqa: RUF012


@found_by("test_old_spellings_of_rope_mean_the_same", "is not read as in transformers: layers.0..attention.rope")
class IgnoresRopeScaling(Llama):
    def traits(self, config):
        return super().traits(replace(config, values={**config.values, "rope_scaling": None}))


@found_by("test_no_field_is_ignored", "ignores hidden_act, and 'relu'")
class IgnoresTheActivation(Llama):
    def traits(self, config):
        return replace(super().traits(config), activation="silu")


@found_by("test_no_field_is_ignored", "ignores layer_types")
class SlidesEverywhere(Qwen3):
    def traits(self, config):
        hidden = {field: config.values[field] for field in config.values if field != "layer_types"}
        return super().traits(replace(config, values=hidden))

    cases = {"window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}}  # noqa: RUF012


@found_by("test_a_window_is_short", "the window 4096 exceeds the kit's contexts")
class TestsNoWindow(Mistral):
    cases = {"window": {}}  # noqa: RUF012


@found_by("test_names_lead_to_the_family", "LlamaForCausalLM")
class MisspeltArchitecture(Llama):
    architectures = ("LLaMAForCausalLM", "LlamaForCausalLM")


class LlamaInOneExpression(Family):
    """A right family in another style: no helper, every trait given."""

    architectures = ("LlamaForCausalLM",)
    model_type = "llama"
    cases = {"all": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}}  # noqa: RUF012

    def traits(self, config):
        flags = {name: config.values.get(name) or False for name in ("attention_bias", "mlp_bias")}
        return Traits(
            rope=lambda layer: rope_spec(config, head_dim_of(config), theta=1e4),
            qkv_bias=flags["attention_bias"],
            output_bias=flags["attention_bias"],
            mlp_bias=flags["mlp_bias"],
            scale=head_dim_of(config) ** -0.5,
            window=lambda layer: None,
            activation="hidden_act",
        )


@found_by("test_classes_are_those_of_the_reference", "by 'cls' of its states")
class ClassifiesByTheFirstToken(Llama):
    def outputs(self, config, architecture):
        return OutputLayers("cls", (DenseLayer("score"),))


@found_by("test_tensors_are_checked_by_name", "q_proj.bias would be in the checkpoint of another model")
class IgnoresAllBiases(Llama):
    cases = {"plain": {}}  # noqa: RUF012

    def traits(self, config):
        return replace(super().traits(config), ignored=(r"bias$",))


@found_by("test_other_architectures_are_those_of_the_reference", "as GraniteForCausalLM")
class TakesGraniteForLlama(Llama):
    architectures = ("LlamaForCausalLM", "GraniteForCausalLM")


@found_by("test_other_sizes_are_those_of_the_reference", "with {'num_key_value_heads': 1}")
class RotatesNothingWithOneKVHead(Llama):
    def traits(self, config):
        traits = super().traits(config)
        rope = traits.rope(0)
        return replace(traits, rope=lambda layer: rope.unrotated if config.count("num_key_value_heads") == 1 else rope)


@found_by("test_wrong_values_of_fields_are_refused", "head_dim='word' raises TypeError")
class ReadsAFieldAsItIs(Llama):
    def traits(self, config):
        scale = config.values["head_dim"] ** -0.5
        return replace(super().traits(config), scale=scale)


@found_by("test_ropes_are_those_of_the_reference", "'rope_type': 'longrope'.*are off by")
class LongFactorsBeyondTheLongestContext(Llama):
    def traits(self, config):
        rope = super().traits(config).rope(0)
        original = config.count("max_position_embeddings") if rope.long else 0
        return replace(super().traits(config), rope=lambda layer: replace(rope, original=original))


@found_by("test_no_field_is_ignored", "ignores num_experts_per_tok, and 3 instead of 2 changes")
class RoutesToTwoExperts(Qwen3Moe):
    def traits(self, config):
        traits = super().traits(config)

        def moe(layer, prefix, norm):
            found = traits.moe(layer, prefix, norm)
            return None if found is None else replace(found, top_k=min(2, found.top_k))

        return replace(traits, moe=moe)


@found_by("test_null_is_not_the_default", "with sliding_window=null is read as without it, with 4096")
class TakesNullForTheDefault(Mistral):
    """Reads null, which means that there is no window, as the default."""

    cases = {"window": {"sliding_window": 7}}  # noqa: RUF012

    def traits(self, config):
        window = config.optional_count("sliding_window", 4096) or 4096
        return replace(super().traits(config), window=lambda layer: window)


class _Changed(dict):
    """Config of which some values are others."""

    def __init__(self, values, changed):
        super().__init__({**values, **changed})
        self.values_of, self.changed = values, changed

    def get(self, field, default=None):
        return self.changed[field] if field in self.changed else self.values_of.get(field, default)
