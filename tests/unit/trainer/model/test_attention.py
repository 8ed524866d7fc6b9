"""Masks of attention: on CUDA as blocks, elsewhere as pairs, of the same tokens."""

import pytest
import torch

from concertina_trainer.model import attention
from concertina_trainer.model.attention import Scores, attend, causal_mask


@pytest.mark.parametrize("window", [1, 7, 130, 300, 1000])
def test_a_window_hides_the_tokens_before_it(window):
    documents = torch.tensor([[0] * 200 + [1] * 100])
    queries = keys = torch.arange(300)
    pairs = causal_mask(documents, 300, None, torch.device("cpu"), window)
    for query in (0, 5, 131, 199, 200, 299):
        first = max(query - window + 1, 0 if query < 200 else 200)
        assert pairs[0, 0, query].nonzero().flatten().tolist() == list(range(first, query + 1))
    blocks = attention._blocks(documents, queries, keys, min(window, 300))
    zero = torch.tensor(0)
    assert torch.equal(blocks.mask_mod(zero, zero, queries[:, None], keys[None, :]), pairs[0, 0])
    seen = torch.nn.functional.pad(pairs[0, 0], (0, 84, 0, 84)).unflatten(1, (3, 128)).unflatten(0, (3, 128))
    assert torch.equal(blocks.to_dense()[0, 0].bool(), seen.any(dim=3).any(dim=1))


def test_sinks_on_blocks_are_those_of_pairs(monkeypatch):
    """Compare FlexAttention, as on CUDA but not compiled, with the softmax over all scores and the sink."""
    monkeypatch.setattr(attention, "_compiled", lambda: attention.flex_attention)
    torch.manual_seed(2)
    query, key, value = torch.randn(2, 4, 140, 16), torch.randn(2, 2, 140, 16), torch.randn(2, 2, 140, 16)
    documents, positions = torch.tensor([[0] * 90 + [1] * 50] * 2), torch.arange(140)
    sinks, scores = torch.tensor([-9.0, 0.0, 1.5, 4.0]), Scores(True, 0.25)
    pairs = causal_mask(documents, 140, None, torch.device("cpu"), 33)
    blocks = attention._blocks(documents, positions, positions, 33)
    expected = attend(query, key, value, pairs, scores, sinks)
    torch.testing.assert_close(attend(query, key, value, blocks, scores, sinks), expected, rtol=1e-5, atol=1e-5)
    plain = attend(query, key, value, pairs, scores)
    torch.testing.assert_close(expected[:, 0], plain[:, 0], rtol=1e-2, atol=1e-2)
    assert expected[:, 3].norm() < 0.5 * plain[:, 3].norm(), "the sink takes a share of the attention"


def test_a_window_of_a_whole_sequence_is_none():
    assert causal_mask(None, 8, None, torch.device("cpu"), 8) is None
    assert causal_mask(None, 8, None, torch.device("cpu"), 7) is not None
