"""Code shared by all pictures: the frame of the file, the legend, the colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# Light and dark of a hue, for what goes forward and what goes backward; neighbours differ in hue, white text is legible on every
# dark one.
COLOURS = (
    ("#bfdbfe", "#2563eb"),
    ("#fde68a", "#b45309"),
    ("#a7f3d0", "#047857"),
    ("#fecdd3", "#e11d48"),
    ("#ddd6fe", "#7c3aed"),
    ("#a5f3fc", "#0e7490"),
    ("#d9f99d", "#4d7c0f"),
    ("#f5d0fe", "#a21caf"),
)
INK, GREY, EMPTY = "#1f2937", "#4b5563", "#f3f4f6"
RIGHT = 16
DIGIT = 0.62  # width of a digit, as a share of the font size


def document(width: float, height: float, body: Sequence[str]) -> str:
    """The text of an SVG file of this size in pixels, on white."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}">',
            f'<rect width="{width}" height="{height:g}" rx="6" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def legend(items: Sequence[tuple[str, str]], remark: str, left: float, width: float, y: float) -> list[str]:
    """Return a legend of pairs (colour, meaning) from the left, and a remark at the right; ``y``: line of the text."""
    out = []
    x = left
    for colour, text in items:
        out.append(f'<rect x="{x}" y="{y - 10:g}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 18}" y="{y:g}" font-size="11" fill="{GREY}">{escape(text)}</text>')
        x += 40 + 7 * len(text)
    out.append(
        f'<text x="{width - RIGHT}" y="{y:g}" font-size="11" fill="{GREY}" text-anchor="end">{escape(remark)}</text>'
    )
    return out
