"""Draws docs/memory.svg: bytes of training a Llama 3.1 8B by cause: `python -m docs.draw_memory`.

A bar is a GPU at its peak, as `python -m ring_attention_pytorch memory` counts it: of each length
and number of GPUs one as it is, and one with feed-forwards by chunks and inputs on the host.
"""

from pathlib import Path

from ring_attention_pytorch.doctor.memory import Sizes, Training, length_of, peak
from ring_attention_pytorch.svg import COLOURS, FAINT, INK, box, line, page, text

HERE = Path(__file__).parent
LENGTHS, RANKS, CHUNK = (1 << 17, 1 << 19, 1 << 20), (2, 4, 8), 4096
PARTS = {  # what is drawn as one, and its colour
    "weights, gradients, moments": (("weights", "gradients", "moments"), COLOURS[0]),
    "FSDP's gathered weights and sums": (("FSDP",), COLOURS[4]),
    "inputs of layers": (("inputs",), COLOURS[1]),
    "one layer in backward": (("layer",), COLOURS[2]),
    "keys that others read, loss, rest": (("attention", "loss", "rest"), COLOURS[3]),
}
GPUS = {"80 GB": 74.5, "141 GB": 131.3}  # in GiB
LEFT, WIDE, BAR, GAP, MOST = 96, 430, 11, 8, 150  # MOST: GiB at the right end


def drawing() -> str:
    """Return the bars, and their legend."""
    parts, y = [text(10, 20, "Training Llama 3.1 8B: GiB a GPU, by tokens and GPUs", size=17)], 44.0
    for name, (_, colour) in PARTS.items():
        parts += [box(10, y - 11, 14, 12, colour), text(32, y, name, size=15)]
        y += 22
    parts.append(text(10, y, "thin: feed-forwards by chunks, inputs on the host", size=15))
    y += 44
    top = y - 12
    for tokens in LENGTHS:
        for ranks in RANKS:
            parts.append(text(10, y + 12, f"{length_of(tokens)}, {ranks}", size=15))
            parts += bar(Training(tokens, ranks), y, BAR)
            thin = Training(tokens, ranks, offload=True, chunk=CHUNK)
            parts += bar(thin, y + BAR + 1, BAR / 2)
            y += 1.5 * BAR + GAP
        y += GAP
    for name, at in GPUS.items():
        x = LEFT + WIDE * at / MOST
        parts.append(line([(x, top), (x, y - GAP)], INK, 1.5, "3 3"))
        parts.append(text(x, top - 6, name, size=15, anchor="middle"))
    for at in range(0, MOST + 1, 50):
        x = LEFT + WIDE * at / MOST
        parts.append(line([(x, top), (x, y - GAP)], FAINT, width=1))
        parts.append(text(x, y + 10, f"{at}", size=15, anchor="middle"))
    return page(LEFT + WIDE + 20, y + 18, *parts)


def bar(how: Training, y: float, high: float) -> list[str]:
    """Return the parts of a bar; what is beyond the right end is a number."""
    _, found = peak(Sizes(), how)
    parts, x, end = [], float(LEFT), float(LEFT + WIDE)
    for names, colour in PARTS.values():
        wide = min(WIDE * sum(found.get(n, 0) for n in names) / 2**30 / MOST, end - x)
        parts.append(box(x, y, wide, high, colour))
        x += wide
    if x >= end:
        whole = f"{sum(found.values()) / 2**30:.0f}"
        parts.append(text(end - 4, y + high, whole, "white", size=13, anchor="end"))
    return parts


if __name__ == "__main__":
    (HERE / "memory.svg").write_text(drawing())
