"""What bench_gpu.py asks of a device: how fast it copies, how much of it is used, and what a step has to read."""

import json
import subprocess
import sys

import pydflash


def weight_bytes(target: pydflash.TargetModel, draft: pydflash.DraftModel | None) -> tuple[int, int]:
    """Bytes of weights that a plain step reads, and that a drafted one reads.

    An embedding table is looked up, not read, unless it is the output head too; the drafter reads the target's head
    once more unless it has its own. Of experts a step is taken to read those of one token.
    """
    with pydflash.GgufFile.open(target.path) as file:
        sizes = {tensor.name: tensor.n_bytes for tensor in file.tensors}
    head = sizes.get("output.weight", sizes["token_embd.weight"])
    config = target.config
    share = config.n_expert_used / config.n_expert if config.n_expert else 1.0
    layers = sum(
        n * share if "_exps." in name else n
        for name, n in sizes.items()
        if name not in ("output.weight", "token_embd.weight")
    )
    plain = int(layers) + head
    if draft is None:
        return plain, plain
    return plain, plain + draft.config.weight_bytes + (0 if draft.config.has_own_head else head)


_COPY_PROGRAM = """
import json, statistics, torch
n = 1 << 31
a = torch.randint(0, 255, (n,), dtype=torch.uint8, device="cuda")
b = torch.empty_like(a)
times = []
for _ in range(12):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(); b.copy_(a); end.record(); torch.cuda.synchronize()
    times.append(begin.elapsed_time(end))
print(json.dumps({"bytes_per_second": 2 * n / statistics.median(times[2:]) * 1e3, "gpu": torch.cuda.get_device_name()}))
"""


def measured_copy() -> dict[str, float | str] | None:
    """Rate of a large copy on the first GPU, bytes read plus written, by PyTorch in a process of its own."""
    done = subprocess.run([sys.executable, "-c", _COPY_PROGRAM], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        return None
    result: dict[str, float | str] = json.loads(done.stdout)
    return result


def used_memory(device: str) -> int:
    """Bytes in use on a device by all processes, as the driver counts them."""
    info = next(d for d in pydflash.devices() if d.name == device)
    return info.memory_total - info.memory_free
