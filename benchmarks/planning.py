"""Time model of `concertina plan` compared with published runs: the predicted MFU and the published one.

python benchmarks/planning.py [--json FILE]

Sources: torchtitan's docs/performance.md (A100) and benchmarks/llama3_h100_202412_torchtitan.md; The Llama 3 Herd of
Models, arXiv 2407.21783, table 4; MegaScale, arXiv 2402.15627; DeepSeek-V3, arXiv 2412.19437, table 1 and section 3
(14.8 trillion tokens in 2.664 million hours of H800; products in FP8; zero bubble stands for DualPipe). The MFU of
torchtitan's H100 runs and of DeepSeek-V3 is computed from their tokens a second, with this repository's count of
operations and the peak of bfloat16. Rows marked `set` are those from which a GPU's `kernels` was determined.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import report

from concertina.planning.hardware import FABRICS, GPUS, FabricName, GpuName
from concertina.planning.layout import ParallelLayout
from concertina.planning.timing import mfu, step_time
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.model.flops import token_flops

LLAMA_8B = {"layers": 32, "dim": 4096, "heads": 32, "kvHeads": 8, "hiddenDim": 14336}
LLAMA_70B = {"layers": 80, "dim": 8192, "heads": 64, "kvHeads": 8, "hiddenDim": 28672}
LLAMA_405B = {"layers": 126, "dim": 16384, "heads": 128, "kvHeads": 8, "hiddenDim": 53248}
GPT_175B = {"layers": 96, "dim": 12288, "heads": 96, "hiddenDim": 32768}
"""Model of MegaScale.

Its feed-forward layer has two matrices of width 4 dim. The decoder here has three matrices of width 8/3 dim.
"""
DEEPSEEK_V3: dict[str, object] = {
    "layers": 61, "dim": 7168, "heads": 128, "hiddenDim": 18432,
    "experts": {"count": 256, "activePerToken": 8, "hiddenDim": 2048, "shared": 1, "firstDense": 3},
}  # fmt: skip
"""Model of DeepSeek-V3.

Its latent attention has 187 million weights per layer, with heads of 192 and 128. The decoder here has 205 million.
"""


@dataclasses.dataclass(frozen=True)
class Published:
    name: str
    gpu: GpuName
    fabric: FabricName
    model: Mapping[str, object]
    parallelism: dict[str, object]
    size: int
    batch: int
    rows: int
    activations: str
    mfu: float | None = None
    tokens: float | None = None
    """Tokens per second of each GPU."""
    length: int = 8192
    vocabulary: int = 128256
    reshard: str = "Auto"
    """Value of `reshardAfterForward`. Llama 3 and MegaScale don't free gathered weights."""


SET = " (set)"
INTERLEAVED = {"tensor": 8, "pipeline": 16, "schedule": "Interleaved1F1B"}
RUNS = [
    Published(f"torchtitan 8B, 64 A100, FSDP{SET}", GpuName.a100, FabricName.infiniband200, LLAMA_8B, {}, 64, 64, 1,
              "KeepProducts", tokens=2973),
    Published(f"torchtitan 70B, 64 A100, FSDP{SET}", GpuName.a100, FabricName.infiniband200, LLAMA_70B, {}, 64, 64, 1,
              "Recompute", tokens=331),
    Published(f"torchtitan 8B, 8 H100 at 500 W, FSDP{SET}", GpuName.h100, FabricName.infiniband400, LLAMA_8B, {}, 8, 16,
              2, "KeepProducts", tokens=5762),
    Published("torchtitan 8B, 128 H100 at 500 W, FSDP", GpuName.h100, FabricName.infiniband400, LLAMA_8B, {}, 128, 256,
              2, "KeepProducts", tokens=5605),
    Published(f"Llama 3 405B, 8192 H100{SET}", GpuName.h100, FabricName.ethernet400, LLAMA_405B, INTERLEAVED, 8192,
              2048, 1, "Keep", mfu=0.43, reshard="Never"),
    Published("Llama 3 405B, 16384 H100", GpuName.h100, FabricName.ethernet400, LLAMA_405B, INTERLEAVED, 16384, 2048, 1,
              "Keep", mfu=0.41, reshard="Never"),
    Published("Llama 3 405B, 16384 H100, 131072 tokens", GpuName.h100, FabricName.ethernet400, LLAMA_405B,
              {**INTERLEAVED, "context": 16}, 16384, 128, 1, "Keep", mfu=0.38, length=131072, reshard="Never"),
    Published("MegaScale 175B, 12288 A100", GpuName.a100, FabricName.infiniband200, GPT_175B,
              {**INTERLEAVED, "pipeline": 8}, 12288, 6144, 1, "Keep", mfu=0.552, length=2048, vocabulary=64000,
              reshard="Never"),
    Published("DeepSeek-V3 671B, 2048 H800, FP8", GpuName.h100, FabricName.infiniband400, DEEPSEEK_V3,
              {"pipeline": 16, "schedule": "InterleavedZeroBubble", "expert": 64}, 2048, 15360, 1, "Keep",
              tokens=14.8e12 / (2.664e6 * 3600), length=4096, vocabulary=129280, reshard="Never"),
]  # fmt: skip


def layout(run: Published) -> ParallelLayout:
    model = {**run.model, "vocabSize": run.vocabulary, "sequenceLength": run.length, "tieEmbeddings": False}
    trainer = TrainerConfig.model_validate(
        {
            "data": {"uri": "/none"}, "model": model, "globalBatchSize": run.batch, "microBatchSize": run.rows,
            "memory": {"activations": run.activations, "reshardAfterForward": run.reshard},
        }
    )  # fmt: skip
    return ParallelLayout(trainer, ParallelismConfig.model_validate(run.parallelism), run.size, 8)


def published_mfu(run: Published) -> float:
    if run.mfu is not None:
        return run.mfu
    assert run.tokens is not None
    return run.tokens * token_flops(layout(run).trainer.model) / GPUS[run.gpu].flops


def expected_mfu(run: Published) -> float:
    gpu, planned = GPUS[run.gpu], layout(run)
    return mfu(planned, gpu, step_time(planned, gpu, FABRICS[run.fabric]).total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, list[float]] = {}
    print(f"{'':44} published  expected  error")
    for run in RUNS:
        known, expected = published_mfu(run), expected_mfu(run)
        print(f"{run.name:44} {known:9.1%} {expected:9.1%} {expected / known - 1:+6.0%}")
        rows |= {f"{run.name}, published MFU": [known], f"{run.name}, expected MFU": [expected]}
    errors = [abs(expected_mfu(run) / published_mfu(run) - 1) for run in RUNS if not run.name.endswith(SET)]
    print(f"mean error of the runs that set nothing: {sum(errors) / len(errors):.0%}, worst {max(errors):.0%}")
    report.write(options.json, "planning", {}, rows)


if __name__ == "__main__":
    main()
