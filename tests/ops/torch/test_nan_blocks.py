"""A row never reads blocks of others, whose keys and values may be NaN."""

import numpy as np
import pytest

from fd_core.ops.torch.ops import TorchOps
from fd_core.testing.models.layers import Geometry, LayerOn


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_shorter_rows_do_not_read_blocks_of_others(softcap):
    layers = (
        LayerOn(TorchOps(), Geometry(softcap=softcap, spare_blocks=spare), [(1, 3), (1, 40)]) for spare in range(200)
    )
    layer = next(each for each in layers if 0 not in each.blocks)
    right = layer.run(layer.ops)[1]
    others = np.setdiff1d(np.arange(layer.cache.num_blocks, dtype=np.int32), layer.blocks)
    kept = layer.cache.export_blocks(others)
    layer.cache.import_blocks(others, np.full_like(kept, np.nan))
    np.testing.assert_array_equal(layer.run(layer.ops)[1], right)
