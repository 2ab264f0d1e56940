import pytest

from fd_core.cli.bench.compare.workloads import SHAPES, PromptSet, build

CORPUS = list(range(1000, 3000))


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_have_the_number_and_lengths_of_the_shape(name):
    shape = SHAPES[name]
    workload = build(name, CORPUS, seed=1)
    assert len(workload.prompts) == shape.requests
    lengths = [len(p) for p in workload.prompts]
    assert min(lengths) >= shape.shared + shape.min_input
    assert max(lengths) <= shape.shared + shape.max_input
    assert max(lengths) + max(workload.max_tokens) <= shape.longest
    assert len(workload.max_tokens) == shape.requests
    assert max(workload.max_tokens) <= shape.max_tokens
    assert min(workload.max_tokens) >= (shape.min_tokens or shape.max_tokens)
    assert workload.output_tokens == sum(workload.max_tokens)


def test_prompts_depend_on_the_seed_only():
    assert build("w2", CORPUS, 7) == build("w2", CORPUS, 7)
    assert not set(build("w2", CORPUS, 7).prompts) & set(build("w2", CORPUS, 8).prompts)


def test_w3_shares_its_prefix_inside_a_round_and_not_across_rounds():
    first, second = (build("w3", CORPUS, seed) for seed in (1, 2))
    prefixes = {p[:400] for p in first.prompts}
    assert len(prefixes) == 1
    assert len(set(first.prompts)) == 32
    assert prefixes.isdisjoint(p[:400] for p in second.prompts)


@pytest.mark.parametrize("seed", range(5))
def test_no_two_prompts_of_w2_share_a_kv_block_by_accident(seed):
    starts = [p[:16] for p in build("w2", CORPUS, seed).prompts]
    assert len(set(starts)) == len(starts)


def test_unknown_name_and_an_empty_corpus_are_rejected():
    with pytest.raises(ValueError, match="w9"):
        build("w9", CORPUS, 0)
    with pytest.raises(ValueError, match="corpus"):
        build("w1", [], 0)


def test_steady_lengths_are_the_same_for_all_seeds_but_prompts_differ():
    first, second = (build("pressure", CORPUS, seed) for seed in (1, 2))
    assert [len(p) for p in first.prompts] == [len(p) for p in second.prompts]
    assert first.max_tokens == second.max_tokens
    assert len(set(first.max_tokens)) > 1
    assert set(first.prompts).isdisjoint(second.prompts)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "blocks"),
    [
        ((4,), (1,), 1),
        ((4,), (2,), 2),
        ((3, 3), (1, 2), 2),
        ((4, 4), (5, 1), 2),
        ((4, 8, 1), (1, 5, 20), 5),
    ],
)
def test_peak_counts_the_blocks_of_the_fullest_step(lengths, max_tokens, blocks):
    assert PromptSet("x", tuple((1,) * n for n in lengths), max_tokens).peak_blocks(4) == blocks
