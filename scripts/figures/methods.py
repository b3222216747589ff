"""One figure for each method."""

from __future__ import annotations

from scripts.figures.drawing import Drawing


def optimizer() -> str:
    drawing = Drawing(540, 250, "AdamW keeps two matrices for each weight; CAME keeps one and four vectors")
    drawing.text(10, 24, "AdamW", "bold")
    drawing.text(530, 24, "8 bytes per parameter", "muted", "end")
    drawing.box(10, 36, 150, 70, ["momentum m", "R × C"], "plain")
    drawing.box(175, 36, 150, 70, ["second moment v", "R × C"], "plain")
    drawing.line([(10, 122), (530, 122)])
    drawing.text(10, 148, "CAME", "bold")
    drawing.text(530, 148, "4 bytes in fp32, 1 in int8, 0.5 in int4", "muted", "end")
    drawing.box(10, 160, 150, 70, ["momentum m", "R × C, any format"], "soft")
    for x, name in ((182, "squared gradient"), (358, "confidence")):
        drawing.rect(x, 176, 12, 54, "accent", 2)
        drawing.rect(x + 18, 160, 120, 12, "accent", 2)
        drawing.text(x + 20, 198, name)
        drawing.text(x + 20, 218, "row and column means", "muted")
    return drawing.svg()


def tensor_train() -> str:
    drawing = Drawing(540, 240, "A weight matrix is replaced by a chain of small cores, linked by ranks")
    drawing.text(10, 24, "Dense layer", "bold")
    drawing.box(10, 50, 130, 130, ["W", "768 × 768"], "plain")
    drawing.text(75, 204, "589,824", "bold", "middle")
    drawing.text(75, 222, "parameters", "muted", "middle")
    drawing.arrow((152, 115), (186, 115))
    drawing.text(200, 24, "TT layer of rank 30", "bold")
    sizes = ("12", "8", "8", "8", "8", "12")
    for number, size in enumerate(sizes):
        x = 200 + 56 * number
        if number:
            drawing.line([(x - 18, 115), (x, 115)], "strong")
            rank = "12" if number in (1, 5) else "30"
            drawing.text(x - 9, 92, rank, "muted", "middle")
        drawing.line([(x + 19, 134), (x + 19, 152)])
        drawing.text(x + 19, 168, size, "muted", "middle")
        drawing.box(x, 96, 38, 38, [f"G{number + 1}"], "soft")
    drawing.text(275, 66, "input cores merge to A", "muted", "middle")
    drawing.text(445, 66, "output cores merge to B", "muted", "middle")
    drawing.text(359, 204, "20,448", "bold", "middle")
    drawing.text(359, 222, "parameters; y = (x A) B, W is never built", "muted", "middle")
    return drawing.svg()


def exchange() -> str:
    drawing = Drawing(540, 300, "Each replica keeps a momentum and sends only its largest cosine coefficients")
    for x, name in ((10, "Replica 1"), (300, "Replica 2")):
        drawing.text(x, 24, name, "bold")
        drawing.box(x, 36, 230, 40, ["momentum += gradient"])
        drawing.arrow((x + 115, 76), (x + 115, 98))
        drawing.box(x, 100, 230, 40, ["DCT of 64 × 64 blocks, top 8"])
        drawing.arrow((x + 115, 140), (x + 115, 168))
    drawing.box(
        10, 170, 520, 44, ["exchange signs and indices", "the rest stays in the momentum for later steps"], "soft"
    )
    for x in (10, 300):
        drawing.arrow((x + 115, 214), (x + 115, 240))
        drawing.box(x, 242, 230, 44, ["decode the mean, update", "identical on all replicas"])
    return drawing.svg()


def low_precision() -> str:
    drawing = Drawing(540, 220, "The forward pass uses rounded weights; the gradient updates the exact ones")
    drawing.box(10, 40, 150, 56, ["weights", "full precision"], "plain")
    drawing.arrow((160, 68), (198, 68))
    drawing.box(200, 40, 150, 56, ["round to int4", "scale × code"], "soft")
    drawing.arrow((350, 68), (388, 68))
    drawing.box(390, 40, 140, 56, ["forward pass", "loss"])
    drawing.text(179, 28, "every forward pass", "muted", "middle")
    drawing.line([(460, 96), (460, 130), (85, 130)])
    drawing.arrow((85, 130), (85, 98))
    drawing.text(272, 150, "the gradient skips the rounding (straight-through)", "muted", "middle")
    for code in range(-8, 8):
        x = 270 + 32 * code
        drawing.line([(x, 182), (x, 194)], "strong")
        drawing.text(x, 212, str(code), "muted", "middle")
    drawing.line([(14, 188), (494, 188)])
    return drawing.svg()


def draw_figures() -> dict[str, str]:
    return {
        "optimizer.svg": optimizer(),
        "tensor-train.svg": tensor_train(),
        "exchange.svg": exchange(),
        "low-precision.svg": low_precision(),
    }
