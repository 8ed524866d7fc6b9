"""The position of Lightning's loaders, without Lightning."""

from types import SimpleNamespace

import pytest

from concertina_state.errors import InvalidInput
from trainingjob._lightning_loops import LightningLoops


@pytest.mark.parametrize("saved", [1, 3])
def test_a_state_of_other_loaders_is_refused(saved):
    fit = SimpleNamespace(
        _combined_loader=SimpleNamespace(flattened=[object(), object()]), load_state_dict=lambda values: None
    )
    loops = LightningLoops(SimpleNamespace(fit_loop=fit))
    loops.load_state_dict({"loaders": [{"began": None}] * saved, "loops": {}})
    with pytest.raises(InvalidInput, match=f"saved with {saved} data loaders, and this run has 2"):
        loops.resume()
