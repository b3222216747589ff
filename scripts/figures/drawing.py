"""A few SVG shapes with one style, legible in light and dark pages."""

from __future__ import annotations

from xml.sax.saxutils import escape

STYLE = """
:root { --page: #ffffff; --text: #1f2328; --muted: #59636e; --line: #8b949e; --plain: #d1d9e0; --accent: #0969da;
        --soft: #ddf4ff; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --text: #f0f6fc; --muted: #9198a1; --line: #7d8590; --plain: #3d444d; --accent: #4493f8;
          --soft: #122d4b; }
}
text { font: 15px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--text); }
.bold { font-weight: 600; } .muted { fill: var(--muted); font-size: 13px; } .on { fill: var(--page); }
.page { fill: var(--page); } .plain { fill: var(--plain); } .accent { fill: var(--accent); }
.soft { fill: var(--soft); stroke: var(--accent); } .box { fill: none; stroke: var(--line); }
.line { fill: none; stroke: var(--line); stroke-width: 1.5; } .strong { stroke: var(--accent); stroke-width: 2; }
.tip { fill: var(--line); }
"""


class Drawing:
    """An SVG picture to which shapes are added in order.

    Figures are at most 540 pixels wide, so that their text is still legible on a phone.
    """

    def __init__(self, width: int, height: int, description: str) -> None:
        self.size = (width, height)
        self.description = description
        self.parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str = "box", radius: float = 3) -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        name = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text{name} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, lines: list[str], kind: str = "box") -> None:
        """Draw a rectangle with centered lines of text; those after the first are small."""
        self.rect(x, y, width, height, kind)
        first = y + height / 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + 18 * number, line, "muted" if number else "", "middle")

    def line(self, points: list[tuple[float, float]], kind: str = "line", arrow: bool = False) -> None:
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        tip = ' marker-end="url(#tip)"' if arrow else ""
        self.parts.append(f'<path class="{kind}" d="M {path}"{tip}/>')

    def circle(self, x: float, y: float, radius: float, kind: str) -> None:
        self.parts.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        self.line(list(points), arrow=True)

    def svg(self) -> str:
        width, height = self.size
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}" role="img">',
                f"<title>{escape(self.description)}</title>",
                f"<style>{STYLE}</style>",
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
                'orient="auto"><path class="tip" d="M 0 0 L 8 4 L 0 8 z"/></marker></defs>',
                f'<rect class="page" width="{width}" height="{height}" rx="6"/>',
                *self.parts,
                "</svg>\n",
            ]
        )
