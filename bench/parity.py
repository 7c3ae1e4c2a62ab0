"""The README's table of largest differences: what the tests of exactness saw, in one run of them.

    python -m bench.parity
"""
import argparse
import sys

import pytest
import torch

from test_mtp import HERE, changed_outputs


class Recorder:
    """A pytest plugin: the largest difference that each test's comparisons saw."""
    worst, current = {}, None

    def pytest_collection_finish(self, session):
        module = sys.modules["test_mtp"]
        real, near = torch.testing.assert_close, module.assert_near

        def assert_close(a, b, **options):
            if torch.is_tensor(a) and a.is_floating_point() and a.numel():
                self.see((a.double() - torch.as_tensor(b).double()).abs().max().item())
            real(a, b, **options)

        def assert_near(x, expected, tolerance, name=""):
            self.see(((x - expected).abs().max() / expected.abs().max().clamp(min=1e-300)).item())
            near(x, expected, tolerance, name)

        torch.testing.assert_close, module.assert_near = assert_close, assert_near

    def pytest_runtest_call(self, item):
        self.current = item.name.partition("[")[0]

    def see(self, difference):
        self.worst[self.current] = max(self.worst.get(self.current, 0.0), difference)


PARITY = ("training_computes_what_serving_computes", "ttt_loss_equals_the_row_by_row_reference",
          "attention_equals_the_dense_reference", "usp_equals_one_rank",
          "decoder_layer_is_transformers_layer", "chunked_loss_equals_autograd_over_whole_logits",
          "any_split_of_a_batch_gives_the_same_gradients",
          "packed_documents_do_not_leak", "kernels_change_rounding_only")


def parity():
    """The README's table: largest difference that each of these tests saw."""
    recorder, names = Recorder(), " or ".join(PARITY)
    code = pytest.main(["-q", str(HERE / "test_mtp.py"), "-k", names], plugins=[recorder])
    for name in PARITY:
        print(f"{recorder.worst.get('test_' + name, float('nan')):10.1e}  test_{name}")
    changed = torch.stack([changed_outputs(seed) for seed in range(20)]).mul(100)  # (seed, way, step)
    for way, x in zip(("without earlier steps' keys", "without advancing positions"), changed.unbind(1)):
        each = (f"step {k} {x[:, k].min():.0f} to {x[:, k].max():.0f} %" for k in (1, 2))
        print(f"outputs of 20 random layers {way} change by: {', '.join(each)}")
    return code


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    sys.exit(parity())
