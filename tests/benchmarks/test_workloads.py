import pytest
from harness.workloads import SHAPES, build

CORPUS = list(range(1000, 3000))


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_have_the_number_and_lengths_of_the_shape(name):
    shape = SHAPES[name]
    workload = build(name, CORPUS, seed=1)
    assert len(workload.prompts) == shape.requests
    lengths = [len(p) for p in workload.prompts]
    assert min(lengths) >= shape.shared + shape.min_input
    assert max(lengths) <= shape.shared + shape.max_input
    assert max(lengths) + workload.max_tokens <= shape.longest
    assert workload.output_tokens == shape.requests * shape.max_tokens


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others():
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


def test_an_unknown_name_and_an_empty_corpus_are_refused():
    with pytest.raises(ValueError, match="w9"):
        build("w9", CORPUS, 0)
    with pytest.raises(ValueError, match="corpus"):
        build("w1", [], 0)
