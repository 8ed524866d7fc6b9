"""Masks of attention: on CUDA as blocks, elsewhere as pairs, of the same tokens."""

import pytest
import torch

from concertina_trainer.model import attention
from concertina_trainer.model.attention import causal_mask


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


def test_a_window_of_a_whole_sequence_is_none():
    assert causal_mask(None, 8, None, torch.device("cpu"), 8) is None
    assert causal_mask(None, 8, None, torch.device("cpu"), 7) is not None
