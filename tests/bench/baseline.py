"""The process that `whole_path` measures against: bare `mlx_lm.generate_step`, and nothing else.

    python baseline.py MODEL_FOLDER

One request a line on stdin, `{"prompt": [ids], "tokens": N}`; one line of answer on stdout, a `Run`
as JSON. The model is loaded once, before the first answer; while it waits it is idle.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.figures import Run

# As the worker does, so that both run the same kernels.
os.environ.setdefault("MLX_CUDA_USE_CUDNN_SDPA", "0")


def main() -> None:
    """Answer requests until stdin ends."""
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generate_step

    model = mlx_lm.load(sys.argv[1])[0]
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.monotonic()
        run = Run(asked=began, arrivals=[], ended=0.0, cpu=[], tokens=[])
        steps = generate_step(mx.array(asked["prompt"]), model, max_tokens=asked["tokens"])
        for token, _ in steps:
            run.arrivals.append(time.monotonic())
            run.tokens.append(int(token))
            run.cpu.append(time.process_time())
        run.ended = time.monotonic()
        print(json.dumps(asdict(run)), flush=True)


if __name__ == "__main__":
    main()
