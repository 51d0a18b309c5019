"""Seeded hashing, and drawing at verify: chi-square against exact distributions on a vocabulary of eight."""

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from sdsie_sglang.cpu_engine import enable, is_enabled
from sdsie_sglang.cpu_engine.ops import sampling, speculation

VOCABULARY = 8
TRIALS = 20_000
REJECT_BELOW = 1e-4  # a right sampler fails one run in ten thousand; seeded, so never here


@pytest.fixture(scope="module")
def verify():
    enable()
    from sdsie_sglang.cpu_engine import sampled_verify

    return sampled_verify


@pytest.fixture(autouse=True)
def eager_and_seeded():
    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):  # SGLang compiles its seeded sampler: half a minute
        yield


def murmur3_32(data: bytes) -> int:
    """Reference from the published algorithm."""
    h, mask = 0, 0xFFFFFFFF
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & mask
        k = ((k << 15) | (k >> 17)) & mask
        h ^= k * 0x1B873593 & mask
        h = (((h << 13) | (h >> 19)) & mask) * 5 + 0xE6546B64 & mask
    h ^= len(data)
    h = (h ^ (h >> 16)) * 0x85EBCA6B & mask
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & mask
    return h ^ (h >> 16)


def test_murmur_hash():
    seeds = [0, 1, 2**31, 2**63 + 12345, 2**64 - 1]
    positions, columns = [0, 7, 100_000, 5, 2**31 - 1], [0, 1, 49_151]
    hashed = sampling.murmur_hash32_cpu(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    assert hashed.dtype == torch.uint32
    for i, (s, p) in enumerate(zip(seeds, positions, strict=True)):
        for j, c in enumerate(columns):
            data = s.to_bytes(8, "little") + p.to_bytes(4, "little") + c.to_bytes(4, "little")
            assert hashed[i, j].item() == murmur3_32(data)


def info(requests, **changes):
    """SamplingBatchInfo of requests given as dicts: temperature, top_k, top_p, min_p; {} is greedy."""
    everything = 1 << 30

    def column(name, default):
        return torch.tensor([request.get(name, default) for request in requests])

    top_ks = [r.get("top_k", everything) if r else 1 for r in requests]
    fields = {
        "temperatures": column("temperature", 1.0).view(-1, 1),
        "top_ks": torch.tensor(top_ks, dtype=torch.int32),
        "top_ps": column("top_p", 1.0),
        "min_ps": column("min_p", 0.0),
        "need_top_k_sampling": any(k != everything for k in top_ks),
        "need_top_p_sampling": any("top_p" in r for r in requests),
        "need_min_p_sampling": any("min_p" in r for r in requests),
        "max_top_k": None,
        "sampling_seed": None,
        "is_all_greedy": not any(requests),
    }
    return SimpleNamespace(**(fields | changes))


def exact(logits, temperature=1.0, top_k=VOCABULARY, top_p=1.0, min_p=0.0):
    """The distribution that a request samples from, by its definition."""
    p = torch.softmax(logits.double() / temperature, dim=-1)
    order = p.argsort(descending=True)
    keep = torch.zeros_like(p, dtype=torch.bool)
    mass = 0.0
    for rank, token in enumerate(order.tolist()):
        keep[token] = rank < top_k and mass <= top_p and p[token] >= min_p * p.max()
        mass += p[token].item()
    return torch.where(keep, p, 0.0) / p[keep].sum()


def agrees(counts, probabilities):
    """Whether the counts are a draw of the distribution; outcomes of probability zero must not occur."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] / probabilities[possible].sum() * counts.sum()
    return chisquare(counts[possible].numpy(), expected.numpy()).pvalue > REJECT_BELOW


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"temperature": 0.9, "top_k": 3},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_node_is_drawn_from_its_requests_distribution(verify, setting):
    nodes = 3
    logits = torch.randn(nodes, VOCABULARY) * 2
    batch = logits.repeat(TRIALS, 1)
    positions = torch.arange(nodes).repeat(TRIALS)
    tokens = verify.sample_target_tokens(batch, info([setting] * TRIALS), positions)
    assert tokens.shape == (TRIALS, nodes)
    for node in range(nodes):
        counts = tokens[:, node].bincount(minlength=VOCABULARY).double()
        assert agrees(counts, exact(logits[node], **setting)), (node, counts)


def test_the_check_notices_a_wrong_temperature(verify):
    logits = torch.randn(1, VOCABULARY)
    tokens = verify.sample_target_tokens(
        logits.repeat(TRIALS, 1), info([{"temperature": 1.0}] * TRIALS), torch.zeros(TRIALS)
    )
    counts = tokens.flatten().bincount(minlength=VOCABULARY).double()
    assert not agrees(counts, exact(logits[0], temperature=1.1))


def test_greedy_requests_of_a_mixed_batch_keep_the_argmax(verify):
    nodes, settings = 4, [{}, {"temperature": 50.0}, {}, {"temperature": 0.01, "top_p": 0.5}]
    logits = torch.randn(len(settings) * nodes, VOCABULARY)
    before, best = logits.clone(), logits.argmax(-1).view(-1, nodes)
    seen_other = False
    for _ in range(20):
        tokens = verify.sample_target_tokens(logits, info(settings), torch.arange(len(logits)))
        for greedy in (0, 2):
            assert torch.equal(tokens[greedy], best[greedy])
        seen_other |= not torch.equal(tokens[1], best[1])
    assert seen_other
    assert torch.equal(logits, before)  # read only: log-probabilities are taken from it later


def chain_outcomes(distributions, drafts):
    """Probability of every (accepted drafts, bonus token), flattened."""
    out = torch.zeros(len(drafts) + 1, VOCABULARY, dtype=torch.float64)
    reach = 1.0
    for accepted, p in enumerate(distributions):
        out[accepted] = reach * p
        if accepted < len(drafts):
            out[accepted, drafts[accepted]] = 0
            reach *= p[drafts[accepted]].item()
    return out.flatten()


def verify_batch(verify, logits, settings, tokens, child, sibling):
    """Run the two hooks around stand-ins that do what eagle_utils does; (accepted, bonus) of each request."""
    bs, nodes = tokens.shape
    predicts = torch.zeros(bs * nodes, dtype=torch.int32)
    accept_index = torch.full((bs, nodes), -1, dtype=torch.int32)
    accepted = torch.empty(bs, dtype=torch.int32)
    index = torch.arange(bs * nodes).view(bs, nodes)

    def verify_tree_greedy_func(*, target_predict):
        speculation.verify_tree_greedy_cpu(
            predicts, accept_index, accepted, tokens, index, child, sibling, target_predict
        )

    def eagle_sample(verify_input, batch, logits_output):
        target = logits_output.next_token_logits.argmax(-1).view(bs, nodes)
        verify.around_verify_tree_greedy(verify_tree_greedy_func, target_predict=target)

    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False), sampling_info=info(settings))
    verify.around_eagle_sample(
        eagle_sample,
        SimpleNamespace(positions=torch.arange(nodes).repeat(bs)),
        batch,
        SimpleNamespace(next_token_logits=logits),
    )
    bonus = predicts[accept_index.gather(1, accepted.long().view(-1, 1)).flatten()]
    return accepted.long(), bonus.long()


@pytest.mark.parametrize("setting", SETTINGS[:1] + SETTINGS[-1:], ids=str)
def test_what_a_chain_commits_has_the_targets_distribution(verify, setting):
    logits = torch.randn(4, VOCABULARY) * 1.5
    drafts = logits[:3].argmax(-1).tolist()
    drafts[1] = int(logits[1].argsort()[-2])  # one that the target likes second best
    tokens = torch.tensor([[0, *drafts]]).repeat(TRIALS, 1)
    child = torch.tensor([[1, 2, 3, -1]]).repeat(TRIALS, 1)
    accepted, bonus = verify_batch(
        verify, logits.repeat(TRIALS, 1), [setting] * TRIALS, tokens, child, torch.full_like(child, -1)
    )
    counts = (accepted * VOCABULARY + bonus).bincount(minlength=4 * VOCABULARY).double()
    assert agrees(counts, chain_outcomes([exact(row, **setting) for row in logits], drafts))


def test_the_first_token_after_a_tree_has_the_targets_distribution(verify):
    """Root with two children, of which the target's draw may be either or neither."""
    logits = torch.randn(3, VOCABULARY)
    a, b = logits[0].argsort(descending=True)[:2].tolist()
    tokens = torch.tensor([[0, a, b]]).repeat(TRIALS, 1)
    child = torch.tensor([[1, -1, -1]]).repeat(TRIALS, 1)
    sibling = torch.tensor([[-1, 2, -1]]).repeat(TRIALS, 1)
    setting = {"temperature": 1.3}
    accepted, bonus = verify_batch(verify, logits.repeat(TRIALS, 1), [setting] * TRIALS, tokens, child, sibling)
    assert set(bonus[accepted == 0].tolist()).isdisjoint({a, b})
    root = exact(logits[0], **setting)
    rejected = torch.where(torch.isin(torch.arange(VOCABULARY), torch.tensor([a, b])), 0.0, root)
    outcomes = torch.cat((rejected, (root[a] + root[b]).view(1)))
    counts = torch.cat(
        (
            bonus[accepted == 0].bincount(minlength=VOCABULARY).double(),
            (accepted == 1).sum().double().view(1),
        )
    )
    assert agrees(counts, outcomes)


def test_all_greedy_batches_are_not_touched(verify):
    logits = torch.randn(4, VOCABULARY)
    best = logits.argmax(-1)
    tokens = torch.tensor([[0, *best[:3].tolist()]])
    child = torch.tensor([[1, 2, 3, -1]])
    accepted, bonus = verify_batch(verify, logits, [{}], tokens, child, torch.full_like(child, -1))
    assert accepted.item() == 3
    assert bonus.item() == best[3]


@pytest.mark.parametrize("setting", [{"temperature": 0.9}, {"temperature": 1.1, "top_p": 0.9}], ids=str)
def test_a_seeded_draw_is_the_plain_decodes(verify, setting):
    if not is_enabled():
        pytest.skip("the hash op of SGLang's CUDA build has no CPU variant")
    from sglang.srt.layers import sampler

    nodes, seeds = 3, torch.tensor([5, 2**40 + 1])
    logits = torch.randn(len(seeds) * nodes, VOCABULARY)
    positions = torch.tensor([10, 11, 12, 40, 41, 42])
    batch = info([setting] * 2, sampling_seed=seeds)
    tokens = verify.sample_target_tokens(logits, batch, positions).flatten()
    for row in range(len(logits)):  # a plain decode sees one position of one request
        one = info([setting], sampling_seed=seeds[row // nodes].view(1))
        probs = torch.softmax(logits[row : row + 1] / setting["temperature"], dim=-1)
        where = positions[row : row + 1]
        if one.need_top_p_sampling:
            plain = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
                probs, one.top_ks, one.top_ps, one.min_ps, False, one.sampling_seed, where
            )
        else:
            plain = sampler.sampling_from_probs_torch(probs, one.sampling_seed, where)
        assert tokens[row] == plain.item()
