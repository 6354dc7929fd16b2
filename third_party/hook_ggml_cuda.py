"""Write a copy of ggml's CUDA backend source that asks a hook before it runs a node.

    python hook_ggml_cuda.py GGML_CUDA.cu OUTPUT.cu

Two insertions: the declaration of the hook behind the includes, and one call in the loop over the nodes of a graph. The
source itself stays as it is. When an anchor is not found exactly once the script fails and names it.
"""

import sys
from pathlib import Path

DECLARATION_ANCHOR = "\nstatic_assert(sizeof(half) == sizeof(ggml_fp16_t)"
DECLARATION = """
extern "C" {
int (*dflash_ggml_cuda_hook)(int device, void * stream, struct ggml_cgraph * graph, int node) = nullptr;
}
"""
CALL_ANCHOR = "                int nodes_to_skip = ggml_cuda_try_fuse(cuda_ctx, cgraph, i);\n"
CALL = """                if (dflash_ggml_cuda_hook != nullptr && !is_concurrent_event_active) {
                    const int taken = dflash_ggml_cuda_hook(cuda_ctx->device, cuda_ctx->stream(), cgraph, i);
                    if (taken > 0) {
                        i += taken - 1;
                        continue;
                    }
                }
"""


def hooked(source: str) -> str:
    """The source with both insertions. Raises ValueError when an anchor does not occur exactly once."""
    for anchor in (DECLARATION_ANCHOR, CALL_ANCHOR):
        count = source.count(anchor)
        if count != 1:
            raise ValueError(f"found {count} times, want once: {anchor.strip()!r}")
    source = source.replace(DECLARATION_ANCHOR, DECLARATION + DECLARATION_ANCHOR)
    return source.replace(CALL_ANCHOR, CALL + CALL_ANCHOR)


def main(arguments: list[str]) -> int:
    """Run the script."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    source, output = map(Path, arguments)
    try:
        text = hooked(source.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        print(f"{source}: {error}. Build with -DDFLASH_CUDA_KERNELS=OFF to use this ggml as it is.", file=sys.stderr)
        return 1
    if not output.exists() or output.read_text(encoding="utf-8") != text:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
