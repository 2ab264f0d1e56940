"""The tests that every family of models has to pass."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from fd_core.backends.contract import Model
from fd_core.engine.vectors import probabilities_of
from fd_core.errors import ConfigError, ModelError
from fd_core.models.build import check_tensors
from fd_core.models.classifier import read_classifier
from fd_core.models.decoder import DecoderModel
from fd_core.models.families.contract import Family
from fd_core.models.families.installed import installed_families
from fd_core.models.families.spec import DecoderSpec, LinearSpec
from fd_core.models.loading.adapter import read_adapter
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.gguf_family import Gguf
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import image_processor_of, spec_of
from fd_core.ops.contract import Ops
from fd_core.ops.parallel import RankGroup, Stage
from fd_core.testing.kit.growth import one_torch_thread
from fd_core.testing.kit.ranks import on_ranks
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.models.adapters import merge_adapter, write_adapter
from fd_core.testing.models.arrays import Floats
from fd_core.testing.models.checkpoints import SIZES, drawn_ropes
from fd_core.testing.models.families.reference import Logits, general_fields, is_known
from fd_core.testing.models.families.target import LONGEST, FamilyTarget, find_family, float32_backends, load
from fd_core.testing.models.paged import PagedDriver

_ERROR: Final = 1e-4
"""Maximum error of a logit in float32, where the reference itself is exact."""
_NUDGES: Final = 10
"""Allowed error in changes of the reference's logits when each weight moves to a number beside it."""
_SPREAD: Final = 0.1
"""Standard deviation above which logits differ enough."""
_SHAPES: Final[Sequence[dict[str, int]]] = (
    {},
    {"num_hidden_layers": 13, "num_attention_heads": 64, "hidden_size": 64 * SIZES["head_dim"]},
)
_SIZES: Final[Sequence[dict[str, int]]] = (
    {"num_key_value_heads": 4, "vocab_size": 161},
    {"num_key_value_heads": 1},
    {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 104},
)
"""Sizes of published models: every head with its own KV, one KV head for all, and numbers that are no power of two."""
_LENGTHS: Final = (1, 23, 8, 11)
_GENERATED: Final = 12
_FORMS: Final[Mapping[str, float]] = {
    "cpu:dtype=bfloat16": 0.05,
    "cpu:dtype=float32,quantization=int8": 0.1,
    "cpu:dtype=float32,quantization=int4": 0.5,
}
"""Backends with narrow weights, and the largest median error in standard deviations of the logits."""
_IMAGE_SIZES: Final = ((37, 80), (100, 33), (1, 7), (48, 48), (61, 60))
"""Rows and columns in pixels."""
_CHUNKS: Final[Mapping[str, int | None]] = {"whole": None, "chunked": 5}
_ORACLE: Final = "reference"
_OTHERWISE: Final = {*SIZES, "architectures", "model_type", "rope_theta", "rope_scaling", "hidden_act"}
"""Fields that a model has of itself."""

_WRONG_VALUES: Final[Sequence[Any]] = ("word", -1, 0, [], {}, 1.5, True, [[]], math.nan)
_ROPE_FIELDS: Final = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def _in_turn(
    cases: Sequence[tuple[FamilyTarget, str]], ways: Sequence[tuple[str, ...]], skipped: int
) -> Iterator[tuple[tuple[FamilyTarget, str], tuple[str, ...]]]:
    """Yield some cases, each with some ways, so that tests that skip other numbers take other cases."""
    for number, case in enumerate(cases):
        target, name = case
        other = ways[1:][number % max(1, len(ways) - 1) :][:1]
        if name == next(iter(target.family.cases)):
            yield from ((case, way) for way in [ways[0], *other])
        elif (number + skipped) % 2 == 0:
            yield case, ways[number // 2 % len(ways)]


class FamilySuite:
    """Derive a class `Test...` from it and name the family."""

    family: str
    """Name under which a plugin registers it."""
    backends: Sequence[str] = ()
    """Backends that compute the models, such as `cpu:dtype=float32`; by default all that can run here."""
    all_ways = True
    """True if each case runs on every backend and in every way; else the first of a family in the first way and in
    another one in turn, and of the others every second one in one way. Tests of a whole family then run for half of
    several families."""

    def targets(self, config: pytest.Config) -> Sequence[FamilyTarget]:
        """Return the families under test; override for a family that no plugin registers."""
        return [find_family(self.family, config.getoption("--fd-seed"))]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test for the cases of the family, the backends, and the ways to compute a prompt."""
        targets, names = self.targets(metafunc.config), metafunc.fixturenames
        number = len(metafunc.function.__name__)
        if "case" not in names:
            if "target" in names:
                halved = targets[number % 2 :: 2] if len(targets) > 1 and not self.all_ways else targets
                metafunc.parametrize("target", halved, ids=str)
            return
        axes = {"backend": self.backends or float32_backends(), "way": tuple(_CHUNKS), "form": tuple(_FORMS)}
        axes = {name: values for name, values in axes.items() if name in names}
        ways = list(product(*axes.values()))
        cases = [(target, case) for target in targets for case in target.family.cases]
        if self.all_ways:
            rows = [(*case, *way) for case in cases for way in ways]
        else:
            rows = [(*case, *way) for case, way in _in_turn(cases, ways, skipped=number)]
        metafunc.parametrize(("target", "case", *axes), rows, ids=["-".join(map(str, row)) for row in rows])

    @pytest.fixture(autouse=True, scope="class")
    def _one_torch_thread(self) -> Iterator[None]:
        with one_torch_thread():
            yield

    @pytest.fixture(autouse=True)
    def _folder_of_models(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Let pytest remove the models: a worker of xdist may end without finalizers."""
        if "target" in request.fixturenames:
            target: FamilyTarget = request.getfixturevalue("target")
            target.folder = target.folder or tmp_path_factory.mktemp("family")

    def test_names_lead_to_the_family(self, target: FamilyTarget) -> None:
        """Look up the architectures, and the one that `transformers` writes into `config.json`."""
        installed, family = installed_families(), target.family
        for name in family.architectures:
            assert isinstance(installed.architectures.get(name), type(family)), (
                f"{name} is another family's, or unknown: {'; '.join(installed.problems)}"
            )
        folder, _ = target.model(next(iter(family.cases)))
        with open_checkpoint(folder) as checkpoint:
            written = {field: checkpoint.config[field] for field in ("architectures", "model_type")}
        assert written == {"architectures": [family.architectures[0]], "model_type": family.model_type}

    def test_cases_differ_from_defaults(self, target: FamilyTarget) -> None:
        """Remove each field of the config that the family reads: in some case, that has to change the model.

        It may do so only without a second field, as a list of layers may repeat what a number says.
        """
        _require_code(target)
        unused = dict[str, Any]()
        used = {"tie_word_embeddings"}  # another test changes it
        for given in target.family.cases.values():
            values = target.filled(given)
            read = target.fields(values)
            repeated = values.get("rope_parameters") or {}
            unused |= {field: values[field] for field in read if field not in repeated}
            others = [_without(values, other) for other in read]
            described = cache(lambda index, others=others: _described(target, others[index]))
            for field in read:
                value = values[field]
                refusable = 2 * value if isinstance(value, float) and value else None if value else True
                if any(
                    _described(target, _without(each, field)) != described(index) for index, each in enumerate(others)
                ) or (refusable is not None and _refuses(target, {**values, field: refusable})):
                    used.add(field)
        listed = ", ".join(f"{field}={value!r}" for field, value in unused.items() if field not in used)
        assert not listed, f"no case has another value of {listed}"

    def test_absent_fields_have_their_defaults(self, target: FamilyTarget, case: str) -> None:
        """Compare a config without a field with the one in which `transformers` gives its default.

        Many layers show the period of patterns, and many heads leave room for a default number of key and value heads.
        """
        _require_code(target)
        given, compared = target.family.cases[case], 0
        values = target.filled(given)
        for field, shape in product(sorted(target.read(values) & values.keys()), _SHAPES):
            sized = {**given, **shape}
            try:
                whole = target.filled(sized, without=field)
            except Exception:  # noqa: BLE001, S112 -- transformers has no such model
                continue
            # A case may give a part of the field separately.
            expected, found = _described(target, whole), _described(target, _without({**sized, **whole}, field))
            if expected is not None and found is not None:  # to refuse is safe
                compared += 1
                at = _difference(found, expected)
                assert not at, f"a config without {field} is not read as with {field}={whole[field]!r:.80}: {at}"
        assert compared, "no field could be left out"

    def test_null_is_not_the_default(self, target: FamilyTarget, case: str) -> None:
        """Write null into each field that matters and has a default: of a window it means none, for example."""
        _require_code(target)
        given = target.family.cases[case]
        values = target.filled(given)
        for field in sorted(target.read(values) & values.keys()):
            nulled = {**given, field: None}
            try:
                default, null = target.filled(given, without=field), target.filled(nulled)
            except Exception:  # noqa: BLE001, S112 -- transformers has no such model
                continue
            if not default.get(field) or null.get(field, 0) is not None:
                continue
            mine, usual, found = (_described(target, each) for each in (values, default, null))
            if found is not None and found == usual != mine:
                known = self._is_computed(target, nulled, f"with {field}=null")
                assert not known, f"a config with {field}=null is read as without it, with {default[field]!r:.80}"

    def test_wrong_values_of_fields_are_refused(self, target: FamilyTarget) -> None:
        """Give each field that the family reads values of other types and ranges, as in a config that was edited."""
        _require_code(target)
        values = target.filled(next(iter(target.family.cases.values())))
        for field, value in product(sorted(target.read(values) & values.keys()), _WRONG_VALUES):
            try:
                target.describe({**values, field: value})
            except ModelError:
                continue
            except Exception as error:  # noqa: BLE001 -- a plugin may raise anything
                fault = f"raises {type(error).__name__} ({error}), expected a ModelError"
                pytest.fail(f"{field}={value!r} {fault}: read it with a typed method, such as `config.count`")

    def test_no_field_is_ignored(self, target: FamilyTarget) -> None:
        """Change each switch, number, activation and list of the config; the model has to be that of the reference.

        Lists and switches are changed in all cases, as kinds of layers matter only with a window.
        """
        _require_code(target)
        tried = changed = 0
        for index, given in enumerate(target.family.cases.values()):
            values = target.filled(given)
            base, described = _sampled(target, given), _described(target, values)
            for field in sorted(
                values.keys() - general_fields() - SIZES.keys() | {"tie_word_embeddings"} & values.keys()
            ):
                other = _other_value(field, values[field])
                if other is None or (index and not isinstance(other, list | bool)):
                    continue
                tried += 1
                try:
                    found = _described(target, target.filled({**given, field: other}))
                    same = _sampled(target, {**given, field: other}) == base
                except Exception:  # noqa: BLE001, S112 -- transformers has no such model
                    continue
                changed += 1
                what = f"{field}, and {other!r} instead of {values[field]!r} changes the model"
                assert same or found != described, f"the family ignores {what}"
                if found not in (described, None):  # to refuse is safe
                    self._is_computed(target, {**given, field: other}, f"with {field}={other!r}")
        assert changed or not tried, "no field could be changed"

    def test_ropes_are_those_of_the_reference(self, target: FamilyTarget) -> None:
        """Give the model each kind of rope: it has to be computed, or refused."""
        known = [
            self._is_computed(target, given, f"with rope_parameters={given['rope_parameters']!r:.200}")
            for given in _with_ropes(target)
        ]
        assert any(known), "the reference has none of these ropes"

    def test_old_spellings_of_rope_mean_the_same(self, target: FamilyTarget) -> None:
        """Write rope parameters as before `rope_parameters`, and compare with the config that `transformers` reads."""
        known = 0
        for given in _with_ropes(target):
            rope = given["rope_parameters"]
            for spelled in _spellings(next((each for each in rope.values() if isinstance(each, dict)), rope)):
                left_out = "" if "rope_parameters" in spelled else "rope_parameters"
                fields = {**given, **spelled}
                try:
                    whole = target.filled(fields, without=left_out)
                except Exception:  # noqa: BLE001, S112 -- transformers has no such model
                    continue
                known += 1
                values = {**{name: whole[name] for name in whole if name not in _ROPE_FIELDS}, **fields}
                found, expected = _described(target, _without(values, left_out)), _described(target, whole)
                if found is not None and expected is not None:  # to refuse is safe
                    at = _difference(found, expected)
                    assert not at, f"a config with {spelled!r:.300} is not read as in transformers: {at}"
        assert known, "transformers reads none of these spellings"

    def test_tensors_are_checked_by_name(self, target: FamilyTarget, case: str) -> None:
        """Lose each tensor, and then misshape it; add a bias to each linear that has none."""
        folder, _ = target.model(case)
        with open_checkpoint(folder) as checkpoint:
            spec = spec_of(checkpoint)
            linears = [(name, each.stack) for each in _linears(spec) for name in each.names]
            repeated = {name for name, stack in linears if linears.count((name, stack)) > 1}
            assert not repeated, f"two parts of the model read {min(repeated)}"
            names = dict.fromkeys(name for name, _ in spec.tensors())
            check_tensors(spec, checkpoint)
            shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
            for name in names:
                for shape in (None, (*shapes[name][:-1], shapes[name][-1] + 1)):
                    damaged = _Damaged(shapes, name, shape)
                    with pytest.raises(ModelError) as refused:
                        check_tensors(spec, damaged)  # type: ignore[arg-type]
                    assert repr(name) in str(refused.value), f"the refusal of {name} does not name it: {refused.value}"
            for linear in _linears(spec):
                for name, out in linear.stored if not linear.bias and linear.stack is None else ():
                    bias, refusal = linear.bias_tensor(name), ""
                    try:
                        check_tensors(spec, _Damaged(shapes, bias, (out,)))  # type: ignore[arg-type]
                    except ModelError as error:
                        refusal = str(error)
                    assert repr(bias) in refusal, (
                        f"{bias} would be in the checkpoint of another model, and it is ignored; expected a refusal "
                        "that names it: `ignored` of its traits matches too much"
                    )

    def test_logits_are_those_of_the_reference(self, target: FamilyTarget, case: str, backend: str, way: str) -> None:
        """Compute prompts beyond any window, whole or in chunks, and greedy tokens."""
        folder, expected = target.model(case)
        try:
            model, ops = load(backend, folder)
        except ConfigError as error:
            lacks(error.message)
        driver = PagedDriver(model, ops, _prompts(target.seed), LONGEST)
        driver.generate(_GENERATED, _CHUNKS[way])
        _compare(target, driver, expected)

    def test_images_are_those_of_the_reference(self, target: FamilyTarget, case: str, backend: str, way: str) -> None:
        """Process images of unusual sizes, and compute prompts with one or two of them, whole or in chunks."""
        if type(target.family).images is Family.images:
            lacks("it takes no images")
        folder, expected = target.model(case)
        with open_checkpoint(folder) as checkpoint:
            processor = image_processor_of(checkpoint)
        assert processor is not None
        rng = np.random.default_rng(target.seed)
        images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in _IMAGE_SIZES]
        given = [[image] for image in images] + [images[:2]]
        prompts, placed = [], []
        for group in given:
            ids, processed = (
                [5, 6],
                [(processor.process_among if len(group) > 1 else processor.process)(image) for image in group],
            )
            for part in (part for each in processed for part in each.parts):
                ids += [11, *[processor.token_id] * part.num_tokens, 12]
            prompts.append(ids)
            placed.append(processor.place(ids, processed))
        longest = max(map(len, prompts)) + 1
        try:
            model, ops = load(backend, folder, longest=longest)
        except ConfigError as error:
            lacks(error.message)
        driver = PagedDriver(model, ops, prompts, longest, images=placed)
        driver.generate(1, _CHUNKS[way])
        for row, group in zip(driver.rows, given, strict=True):
            if expected is None:
                lacks("the family has no reference")
            off = np.abs(np.stack(row.logits) - expected(row.tokens[:-1], group)).max()
            sizes = [each.shape[:2] for each in group]
            assert off <= _ERROR, f"images of {sizes} pixels (seed {target.seed}): a logit is off by {off:.3g}"

    def test_other_sizes_are_those_of_the_reference(self, target: FamilyTarget) -> None:
        """Give the first case other numbers of heads and an odd vocabulary, which are computed or refused."""
        _require_code(target)
        known, given = 0, next(iter(target.family.cases.values()))
        for sizes in _SIZES:
            if self._is_computed(target, {**given, **sizes}, f"with {sizes}"):
                values = target.filled({**given, **sizes})
                known += any(values.get(name) == value for name, value in sizes.items())
        assert known, "the reference has none of these sizes"

    def test_other_architectures_are_those_of_the_reference(self, target: FamilyTarget, tmp_path: Path) -> None:
        """Compute models of further names in `architectures`, of which `transformers` has the code."""
        _require_code(target)
        import transformers

        known = 0
        for name in target.family.architectures[1:]:
            cls = getattr(transformers, name, None)
            if cls is None or not name.endswith("ForCausalLM"):
                continue
            known += 1
            named = {"architectures": (name,), "model_type": cls.config_class.model_type}
            other = FamilyTarget(name, type(name, (type(target.family),), named)(), target.seed, tmp_path / name)
            self._require_logits(target, *other.model_of({}), f"as {name}, a name in `architectures`")
        if not known:
            lacks("transformers has the code of no further architecture")

    def _is_computed(self, target: FamilyTarget, fields: Mapping[str, Any], what: str) -> bool:
        """Compare a model on numpy with the reference, unless the family refuses it; False without a reference."""
        try:
            folder, expected = target.model_of(fields)
            if expected is not None:
                expected([5])
        except Exception:  # noqa: BLE001 -- transformers has no such model
            return False
        self._require_logits(target, folder, expected, what)
        return True

    def _require_logits(self, target: FamilyTarget, folder: Path, expected: Logits | None, what: str) -> None:
        """Compare a model on numpy with the reference, unless the family refuses it."""
        try:
            model, ops = load(_ORACLE, folder)
        except ModelError:
            return
        driver = PagedDriver(model, ops, _prompts(target.seed), LONGEST)
        driver.generate(_GENERATED)  # a context beyond a short rope
        try:
            _compare(target, driver, expected)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error

    def test_classes_are_those_of_the_reference(self, target: FamilyTarget) -> None:
        """Classify the states of texts as the model of the family that `transformers` has for it."""
        _require_code(target)
        _require_head(target)
        folder, classes = target.classifier()
        if classes is None:
            lacks("transformers has no model of this architecture that classifies texts")
        load(_ORACLE, folder)
        classifier = read_classifier(folder)
        assert classifier is not None, "the architecture has no output layers, so that it classifies nothing"
        for tokens in _prompts(target.seed):
            states, logits = classes([token or 1 for token in tokens])  # 0 fills
            pooled = {"last": states[-1:], "cls": states[:1], "mean": states.mean(axis=0, keepdims=True)}
            given = pooled.get(classifier.pooling, states)
            found = probabilities_of(given.astype("<f4").tobytes(), classifier)
            right = np.exp(logits - logits.max())
            off = np.abs(found - right / right.sum()).max() if len(found) == 1 else math.inf
            what = f"the classes of a text of {len(tokens)} tokens, by {classifier.pooling!r} of its states"
            assert off <= _ERROR, f"{what}, are off by {off:.3g}; see `outputs`"

    def test_a_window_is_short(self, target: FamilyTarget) -> None:
        """Require a case whose windows the kit's contexts exceed, if there are windows."""
        windows = list[int]()
        for case in target.family.cases:
            folder, _ = target.model(case)
            with open_checkpoint(folder) as checkpoint:
                found = [each.window for each in spec_of(checkpoint).attention]
            windows += [window for window in found if window is not None]
        assert min(windows, default=0) < max(_LENGTHS), (
            f"the window {min(windows)} exceeds the kit's contexts; give a case a smaller one"
        )

    def test_narrow_weights_stay_near_float32(self, target: FamilyTarget, case: str, form: str) -> None:
        """Compare logits with those of numpy in float32."""
        folder, _ = target.model(case)
        try:
            loaded = [load(backend, folder) for backend in (form, _ORACLE)]
        except (ConfigError, ModelError) as error:
            lacks(error.message)
        found, expected = (_logits(model, ops, target.seed) for model, ops in loaded)
        off = np.median(np.abs(found - expected)) / expected.std()
        assert off < _FORMS[form], f"the logits are off by {off:.3g} of their standard deviation"

    def test_adapters_equal_merged_weights(self, target: FamilyTarget, case: str, backend: str) -> None:
        """Change every linear that adapters may change, and compare with a model of these weights."""
        _require_head(target)
        folder, _ = target.model(case)
        adapter, merged = folder / "adapter", folder / "merged"
        if not adapter.exists():
            merge_adapter(folder, write_adapter(folder, adapter, seed=target.seed), merged)
        try:
            model, ops = load(backend, folder)
        except ConfigError as error:
            lacks(error.message)
        assert isinstance(model, DecoderModel)
        adapted = model.with_adapters([read_adapter(adapter, model.spec.adaptable(), 8)])
        found, expected = _logits(adapted, ops, target.seed, [1]), _logits(*load(_ORACLE, merged), target.seed)
        off = np.abs(found - expected).max()
        assert off <= 4 * _ERROR, f"the logits with an adapter are off by {off:.3g}"

    def test_ranks_share_the_model(self, target: FamilyTarget, case: str) -> None:
        """Compute on two ranks of tensor parallelism, as threads."""
        folder, expected = target.model(case)

        def work(group: RankGroup) -> PagedDriver:
            model, ops = load(_ORACLE, folder, lambda ops: ops.join(group))
            driver = PagedDriver(model, ops, _prompts(target.seed), LONGEST)
            driver.generate(_GENERATED, 5)
            return driver

        for driver in on_ranks(2, work):
            _compare(target, driver, expected)

    def test_stages_divide_the_layers(self, target: FamilyTarget, case: str) -> None:
        """Pass the states of each step from stage to stage, one for each layer."""
        _require_head(target)
        folder, expected = target.model(case)
        with open_checkpoint(folder) as checkpoint:
            count = len(spec_of(checkpoint).layers)
        driver = None
        for index in range(count):
            try:
                model, ops = load(_ORACLE, folder, _cut(Stage(index, count)))
            except ConfigError as error:
                lacks(error.message)
            driver = PagedDriver(model, ops, _prompts(target.seed), LONGEST, stage_before=driver)
        assert driver is not None
        driver.generate(_GENERATED, 5)
        _compare(target, driver, expected)

    def test_gguf_files_have_the_rows_of_the_converter(self, target: FamilyTarget) -> None:
        """The reader of `transformers` shows the order of q and k for few architectures."""
        _require_code(target)
        if not target.family.gguf:
            lacks("it has no GGUF files")
        from fd_core.testing.models.families.gguf_files import is_permuted

        models = [target.describe(target.filled(given)) for given in target.family.cases.values()]
        for arch, stored in target.family.gguf.items():
            found = {is_permuted(arch, [each.rope for each in model.attention]) for model in models} - {None}
            wanted = True in found
            assert not found or stored.permuted in found, (
                f"llama.cpp rotates {'adjacent elements' if wanted else 'as the reference does'} in {arch}, so its "
                f"converter {'permutes' if wanted else 'keeps'} the rows of q and k: set permuted={wanted}"
            )

    def test_gguf_file_is_the_same_model(self, target: FamilyTarget, case: str) -> None:
        """Convert the model, and compare names, values and config with the original.

        Fields that the converter does not write get the values that the reader of GGUF assumes.
        """
        _require_code(target)
        if not target.family.gguf:
            lacks("it has no GGUF files")
        from fd_core.testing.models.families.gguf_files import NamelessTensor, kept_fields, written_fields

        unknown: list[NamelessTensor] = []
        for arch, stored in target.family.gguf.items():
            given, written = target.family.cases[case], written_fields(arch)
            kept = kept_fields(arch, given)
            try:
                file = _gguf_file(target, arch, stored, given)[1]
            except NamelessTensor:
                try:
                    file = _gguf_file(target, arch, stored, kept)[1]
                except NamelessTensor as error:
                    unknown.append(error)
                    continue
            read = file.config
            assumed = target.read(read) & target.filled(given).keys() & read.keys() - written - _OTHERWISE
            compare_gguf(target, arch, stored, kept | {field: read[field] for field in sorted(assumed)})
            check_tensors(spec_of(file), file)  # which may have tensors that the model with fewer fields lacks
        if len(unknown) == len(target.family.gguf):
            lacks(str(unknown[0]))


def compare_gguf(target: FamilyTarget, arch: str, stored: Gguf, given: Mapping[str, Any]) -> None:
    """Compare a model with these fields of the config with its GGUF file, and the logits with the reference."""
    original, converted = _gguf_file(target, arch, stored, given)
    expected, names = spec_of(original), set(converted.names())
    if names >= {name for name, _ in expected.tensors()}:  # else GGUF stores them in other parts, or lacks some
        found = replace(spec_of(converted), architecture=expected.architecture)  # several are converted under one name
        at = _difference(found, expected)
        assert not at, f"the GGUF file describes another model: {at}"
    for name in sorted(names & set(original.names())):
        values = original.read(name).to_float32()
        assert converted.shape(name) == values.shape, f"{name} has another shape in GGUF"
        same = np.allclose(converted.read(name).to_float32(), values, atol=3e-7)
        assert same, f"{name} has other values in GGUF"
    model, ops = load(_ORACLE, converted.path)
    driver = PagedDriver(model, ops, _prompts(target.seed), LONGEST)
    driver.generate(_GENERATED, 5)
    _compare(target, driver, target.model_of(given)[1])


def _gguf_file(
    target: FamilyTarget, arch: str, stored: Gguf, given: Mapping[str, Any]
) -> tuple[Checkpoint, Checkpoint]:
    """Return a model with these fields of the config, and its GGUF file."""
    from fd_core.testing.models.families.gguf_files import convert

    folder, _ = target.model_of(given)
    original, path = open_checkpoint(folder), folder / f"{arch}.gguf"
    return original, open_checkpoint(convert(original, arch, stored, target.filled(given), path))


def _require_code(target: FamilyTarget) -> None:
    if not is_known(target.family):
        lacks(f"transformers has no code for {target.family.model_type}")


def _require_head(target: FamilyTarget) -> None:
    if not target.family.architectures[0].endswith(("ForCausalLM", "ForConditionalGeneration")):
        lacks("it has no output projection")


def _with_ropes(target: FamilyTarget) -> Iterator[dict[str, Any]]:
    """Yield the fields of the first case with other rope parameters, of each kind, for each type of layer."""
    _require_code(target)
    given = next(iter(target.family.cases.values()))
    values = target.filled(given)
    usual = values.get("rope_parameters")
    if not usual:
        lacks("it has no rope")
    layers = [name for name, each in usual.items() if isinstance(each, Mapping)]
    attention = target.describe(values).attention[0]
    for rope in drawn_ropes(np.random.default_rng(target.seed), len(attention.rope.inverse_frequencies)):
        rope |= {name: usual[name] for name in ("mrope_section",) if name in usual}
        yield {**given, "rope_parameters": {name: {**rope} for name in layers} or rope}


def _spellings(rope: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the fields of old configs for rope parameters, and of configs with both."""
    rest = _without(rope, "rope_theta")
    yield {"rope_scaling": {**rest}, "rope_theta": rope["rope_theta"]}
    yield {"rope_scaling": {("type" if name == "rope_type" else name): rest[name] for name in rest}}
    yield {"rope_scaling": {**rest}, "rope_parameters": {"rope_type": "default", "rope_theta": 900.0}}
    yield {"rope_scaling": {**rest}, "original_max_position_embeddings": 32}
    yield {"rope_parameters": {**rope}, "rope_theta": 777.0, "partial_rotary_factor": 0.5}


def _other_value(field: str, value: Any) -> Any:
    """Return another value of a field; None for texts and objects of which only the family knows others."""
    if isinstance(value, list) and value and all(str(each).endswith("_attention") for each in value):
        return ["sliding_attention" if each == "full_attention" else "full_attention" for each in value]
    if isinstance(value, str | list | Mapping):
        return "relu" if "act" in field and isinstance(value, str) else None
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else (value or 1) / 2


def _sampled(target: FamilyTarget, fields: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], bytes]:
    """Return the shapes of the tensors of a model, and logits of the reference."""
    folder, reference = target.model_of(fields)
    assert reference is not None
    with open_checkpoint(folder) as checkpoint:
        shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    return shapes, reference(_prompts(target.seed)[1]).tobytes()


def _described(target: FamilyTarget, values: Mapping[str, Any]) -> DecoderSpec | None:
    """Return the description of a config, None if the family refuses it."""
    try:
        return target.describe(values)
    except ModelError:
        return None


def _refuses(target: FamilyTarget, values: Mapping[str, Any]) -> bool:
    """Return True if the family refuses a field that is set, as `ModelConfig.refuse` does."""
    try:
        target.describe(values)
    except ModelError as error:
        return "is set, but" in error.message
    return False


def _without(values: Mapping[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != field}


def _difference(found: Any, expected: Any, at: str = "") -> str:
    """Return the first difference of two descriptions, empty without one."""
    close = isinstance(found, float) and isinstance(expected, float) and math.isclose(found, expected, rel_tol=1e-6)
    if found == expected or close:
        return ""
    if is_dataclass(expected) and type(found) is type(expected):
        pairs = [
            (f"{at}.{each.name}", getattr(found, each.name), getattr(expected, each.name)) for each in fields(expected)
        ]
    elif isinstance(expected, tuple) and isinstance(found, tuple) and len(found) == len(expected):
        pairs = [(f"{at}[{index}]", *pair) for index, pair in enumerate(zip(found, expected, strict=True))]
    else:
        return f"{at.lstrip('.')} is {found!r:.80}, expected {expected!r:.80}"
    return next((text for name, mine, right in pairs if (text := _difference(mine, right, name))), "")


def _linears(part: Any) -> Iterator[LinearSpec]:
    """Yield the linears of a description."""
    if isinstance(part, LinearSpec):
        yield part
    elif is_dataclass(part) or isinstance(part, tuple):
        inner = part if isinstance(part, tuple) else [getattr(part, each.name) for each in fields(part)]
        for each in inner:
            yield from _linears(each)


class _Damaged:
    """Checkpoint without a tensor, or with another shape of it."""

    path = Path("damaged")

    def __init__(self, shapes: dict[str, tuple[int, ...]], name: str, shape: tuple[int, ...] | None) -> None:
        self._shapes = {each: found for each, found in shapes.items() if each != name}
        self._shapes |= {} if shape is None else {name: shape}

    def names(self) -> Sequence[str]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]


def _prompts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    # Some encoders do not count the first ids, of padding, as positions.
    return [rng.integers(5, SIZES["vocab_size"], length).tolist() for length in _LENGTHS]


def _logits(model: Model, ops: Ops, seed: int, places: Sequence[int] = ()) -> Floats:
    """Return the logits of all prompts, each with the adapter of `places`, if any."""
    prompts = _prompts(seed)
    driver = PagedDriver(model, ops, prompts, LONGEST, places=list(places) * len(prompts) or None)
    driver.generate(1)
    return np.concatenate([np.stack(row.logits) for row in driver.rows])


def _cut(stage: Stage) -> Callable[[Ops], None]:
    return lambda ops: ops.cut(stage)


def _compare(target: FamilyTarget, driver: PagedDriver, reference: Logits | None) -> None:
    """Compare all logits, and each generated token with the best one after the tokens before it."""
    if reference is None:
        lacks("the family has no reference")
    for row in driver.rows:
        expected = reference(row.tokens[:-1])
        assert expected.std() > _SPREAD, "the logits are too small to compare"
        error = np.abs(np.stack(row.logits) - expected).max(axis=1)
        allowed = np.full_like(error, _ERROR)
        if error.max() > _ERROR and "nudged" in inspect.signature(reference).parameters:
            # Norms of small vectors enlarge what is rounded before, in the reference as well.
            allowed += _NUDGES * np.abs(reference(row.tokens[:-1], nudged=True) - expected).max(axis=1)
        position = int((error - allowed).argmax())
        assert error[position] <= allowed[position], (
            f"a prompt of {row.prompt_len} tokens (seed {target.seed}): the logits at position {position} are off by "
            f"{error[position]:.3g}, the first wrong position is {int((error > allowed).argmax())}"
        )
        chosen = expected[row.prompt_len - 1 :]
        lead = chosen.max(axis=1) - chosen[np.arange(len(row.generated)), row.generated]
        assert lead.max() <= 2 * _ERROR, f"a greedy token is not the reference's (seed {target.seed})"
