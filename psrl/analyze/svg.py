"""Plots as inline SVG: no library, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 560, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 44
COLORS = ("#2563eb", "#d97706", "#6b7280", "#059669")


class Series(NamedTuple):
    """A line or a group of bars."""

    name: str
    values: Sequence[float]


def line_plot(title: str, labels: Sequence[str], series: Sequence[Series], unit: str) -> str:
    """Values over labels, evenly spaced; the vertical axis begins at 0."""
    top = _round_up(max((max(s.values) for s in series), default=1.0))
    step = (WIDTH - _LEFT - _RIGHT) / max(1, len(labels) - 1)
    parts = [_axes(title, top, unit), _labels([(_LEFT + i * step, label) for i, label in enumerate(labels)])]
    for color, s in zip(COLORS, series, strict=False):
        points = [(_LEFT + i * step, _y(value, top)) for i, value in enumerate(s.values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>')
        for (x, y), value, label in zip(points, s.values, labels, strict=True):
            tip = escape(f"{s.name}, {label}: {value:,.4g} {unit}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"><title>{tip}</title></circle>')
    return _figure(title, parts, [s.name for s in series])


def histogram(title: str, edges: Sequence[float], series: Sequence[Series], unit: str, axis: str) -> str:
    """Bars between edges, a later series in front of an earlier one."""
    top = _round_up(max((max(s.values, default=0.0) for s in series), default=1.0))
    low, high = edges[0], max(edges[-1], edges[0] + 1)
    scale = (WIDTH - _LEFT - _RIGHT) / (high - low)
    marks = [low + (high - low) * i / 4 for i in range(5)]
    parts = [_axes(title, top, unit), _labels([(_LEFT + (m - low) * scale, f"{m:,.0f}") for m in marks], axis)]
    for color, s in zip((COLORS[2], *COLORS[:2]), series, strict=False):
        for begin, end, value in zip(edges[:-1], edges[1:], s.values, strict=True):
            y = _y(value, top)
            tip = escape(f"{s.name}, {begin:,.0f} to {end:,.0f} {axis}: {value:,.4g} {unit}")
            parts.append(
                f'<rect x="{_LEFT + (begin - low) * scale:.2f}" y="{y:.1f}" width="{(end - begin) * scale:.2f}" '
                f'height="{HEIGHT - _BOTTOM - y:.1f}" fill="{color}"><title>{tip}</title></rect>'
            )
    colors = (COLORS[2], *COLORS[:2])
    return _figure(title, parts, [s.name for s in series], colors)


def _y(value: float, top: float) -> float:
    return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - value / top)


def _round_up(value: float) -> float:
    """To 1, 2, 2.5, 5 times a power of ten."""
    if not value > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= value * (1 - 1e-9))


def _axes(title: str, top: float, unit: str) -> str:
    parts: list[str] = []
    for i in range(5):
        value = top * i / 4
        y = _y(value, top)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(short_number(value))}</text>')
    middle = (HEIGHT - _BOTTOM) / 2
    turned = f'x="12" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 12 {middle:.0f})"'
    parts.append(f"<text {turned}>{escape(unit)}</text>")
    return "".join(parts)


def _labels(places: Sequence[tuple[float, str]], axis: str = "tokens of a micro-batch") -> str:
    parts: list[str] = []
    for i, (x, text) in enumerate(places):
        anchor = "start" if i == 0 else "end" if i == len(places) - 1 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="{anchor}">{escape(text)}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(axis)}</text>')
    return "".join(parts)


def _figure(title: str, parts: Sequence[str], names: Sequence[str], colors: Sequence[str] = COLORS) -> str:
    legend = "".join(
        f'<span><i style="background:{color}"></i>{escape(name)}</span>'
        for color, name in zip(colors, names, strict=False)
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg><div class="legend">{legend}</div></figure>'
    )


def short_number(value: float) -> str:
    """Three digits and a letter."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"
