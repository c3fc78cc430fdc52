"""A picture of lines, areas and words, as SVG (light and dark) or PNG (light)."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]

_LIGHT = {"ink": "#1c2733", "soft": "#5d6f81", "grid": "#dfe5ea", "shade": "#f1f4f7", "paper": "#ffffff", "limit": "#b3261e"}
_DARK = {"ink": "#e6edf3", "soft": "#93a3b3", "grid": "#2f3b47", "shade": "#1a222b", "paper": "#12181f", "limit": "#ff8a80"}
_FONT = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Area:
    """A filled polygon; ``colour`` is a colour of the theme (``shade``) or ``#rrggbb``."""

    points: Sequence[Point]
    colour: str
    tip: str = ""


@dataclass(frozen=True)
class Line:
    """From one point to another, in a colour of the theme."""

    begin: Point
    end: Point
    colour: str = "grid"
    width: float = 1
    dashed: bool = False


@dataclass(frozen=True)
class Words:
    """``anchor``: start, middle or end of the text is at ``x``, its base line at ``y``."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: str = "ink"
    size: int = 13
    bold: bool = False


@dataclass
class Drawing:
    """Shapes, each above those before it."""

    width: int
    height: int
    title: str
    shapes: list[Area | Line | Words] = field(default_factory=list)

    def rectangle(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Filled."""
        self.shapes.append(Area([(x, y), (x + width, y), (x + width, y + height), (x, y + height)], colour))

    def svg(self, name: str = "drawing") -> str:
        """An element that stands by itself or in a page; ``name`` is its class, which no other of the page may have."""
        out = [
            f"<svg xmlns='http://www.w3.org/2000/svg' class='{name}' viewBox='0 0 {self.width} {self.height}' role='img'>",
            f"<title>{html.escape(self.title)}</title><style>{_style(name)}</style>",
            *map(_element, self.shapes),
        ]
        return "\n".join([*out, "</svg>"]) + "\n"

    def png(self, scale: int = 2) -> bytes:
        """``scale`` pixels for a unit. The font is Pillow's own."""
        from PIL import Image, ImageDraw, ImageFont

        fine = 3  # areas have no smooth edges but those that come from making it smaller
        image = Image.new("RGB", (self.width * scale * fine, self.height * scale * fine), _LIGHT["paper"])
        draw = ImageDraw.Draw(image)
        for shape in self.shapes:
            k = scale * fine
            if isinstance(shape, Area):
                draw.polygon([(x * k, y * k) for x, y in shape.points], fill=_LIGHT.get(shape.colour, shape.colour))
            elif isinstance(shape, Line):
                for begin, end in _dashes(shape) if shape.dashed else [(shape.begin, shape.end)]:
                    ends = [(x * k, y * k) for x, y in (begin, end)]
                    draw.line(ends, fill=_LIGHT[shape.colour], width=max(1, round(shape.width * k)))
        image = image.resize((self.width * scale, self.height * scale), Image.Resampling.LANCZOS)
        draw = ImageDraw.Draw(image)
        for shape in self.shapes:
            if isinstance(shape, Words):
                font = ImageFont.load_default(shape.size * scale)
                colour, thicker = _LIGHT[shape.colour], scale / 4 if shape.bold else 0
                anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
                place = (shape.x * scale, shape.y * scale)
                draw.text(place, shape.text, fill=colour, font=font, anchor=anchor, stroke_width=thicker, stroke_fill=colour)
        out = io.BytesIO()
        image.save(out, "PNG", optimize=True)
        return out.getvalue()


def _style(name: str) -> str:
    def rules(theme: dict[str, str]) -> str:
        return " ".join(f".{name} .f-{key} {{ fill: {value}; }} .{name} .s-{key} {{ stroke: {value}; }}" for key, value in theme.items())

    words = f".{name} text {{ font-family: {_FONT}; font-variant-numeric: tabular-nums; }}"
    return f"{words} {rules(_LIGHT)} @media (prefers-color-scheme: dark) {{ {rules(_DARK)} }}"


def _element(shape: Area | Line | Words) -> str:
    if isinstance(shape, Area):
        colour = f"class='f-{shape.colour}'" if shape.colour in _LIGHT else f"fill='{shape.colour}'"
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        tip = f"<title>{html.escape(shape.tip)}</title>" if shape.tip else ""
        return f"<polygon {colour} points='{points}'>{tip}</polygon>"
    if isinstance(shape, Line):
        (x1, y1), (x2, y2) = shape.begin, shape.end
        dashes = f" stroke-dasharray='{_DASH:g} {_DASH:g}'" if shape.dashed else ""
        place = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
        return f"<line class='s-{shape.colour}' {place} stroke-width='{shape.width:g}'{dashes}/>"
    bold = " font-weight='600'" if shape.bold else ""
    how = f"class='f-{shape.colour}' font-size='{shape.size}' text-anchor='{shape.anchor}'{bold}"
    return f"<text x='{shape.x:.1f}' y='{shape.y:.1f}' {how}>{html.escape(shape.text)}</text>"


_DASH = 5.0


def _dashes(line: Line) -> list[tuple[Point, Point]]:
    (x1, y1), (x2, y2) = line.begin, line.end
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5

    def at(along: float) -> Point:
        part = min(along, length) / length
        return x1 + part * (x2 - x1), y1 + part * (y2 - y1)

    return [(at(_DASH * n), at(_DASH * (n + 1))) for n in range(0, int(length / _DASH) + 1, 2)] if length else []
