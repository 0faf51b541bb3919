"""The page of a plan: the tree, the micro-batches in time, and the cache's bytes. One file, nothing to fetch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

from psrl.analyze.page import STYLE, document
from psrl.analyze.report import format_bytes

_STYLE = """
canvas { width: 100%; display: block; border: 1px solid var(--line); border-radius: 6px; }
#tree { height: 420px; } #time { height: 96px; } #bytes { height: 200px; }
#tip { position: fixed; pointer-events: none; background: #111827; color: #fff; padding: 6px 10px; border-radius: 6px;
  font-size: 13px; max-width: 460px; white-space: pre-line; overflow-wrap: anywhere; display: none; z-index: 1; }
"""


def make_page(title: str, picture: Mapping[str, Any]) -> str:
    """The whole document."""
    stats = picture["stats"]
    cards = [
        ("samples", f"{stats['samples']:,}", ""),
        ("tokens", f"{stats['tokens']:,}", ""),
        ("unique tokens", f"{stats['unique_tokens']:,}", ""),
        ("match rate", f"{stats['match_rate']:.1%}", ""),
        ("spine tokens", f"{stats['spine_tokens']:,}", ""),
        ("micro-batches", f"{stats['micro_batches']:,}", ""),
        ("ideal speed-up", f"{stats['ideal_speedup']:.2f}x", ""),
        (f"bytes at the peak ({format_bytes(stats['kv_bytes_peak'])})", f"{stats['kv_bytes_peak']:,}", ' id="peak"'),
    ]
    inner = "".join(
        f'<div class="card"><b{tag}>{value}</b><span>{escape(name)}</span></div>' for name, value, tag in cards
    )
    data = json.dumps(picture, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    script = resources.files("psrl.plan_view").joinpath("page.js").read_text(encoding="utf-8")
    body = f"""<h1>{escape(title)}</h1>
<p class="soft">Micro-batches of at most {stats["max_tokens"]:,} tokens in {stats["waves"]:,} wave(s).</p>
<div class="cards">{inner}</div>
<h2>Prefix tree</h2>
<p class="soft">From left to right the place in the sample, from top to bottom the leaves of the tree. A colour is a
micro-batch; dark ones are spine, whose K/V are cached. Click one to see it alone, click elsewhere for all.</p>
<canvas id="tree"></canvas>
<h2>Micro-batches in time</h2>
<p class="soft">Above pass 1 (forward only), below pass 2 (forward and backward); widths are predicted FLOPs, vertical
lines separate waves.</p>
<canvas id="time"></canvas>
<h2>Cache</h2>
<p class="soft">Bytes of <span style="color:#2563eb">K/V</span> and of their
<span style="color:#d97706">gradient accumulators</span> on top of it.</p>
<canvas id="bytes"></canvas>
<div id="tip"></div>
<script type="application/json" id="plan">{data}</script>
<script>{script}</script>"""
    return document(title, STYLE + _STYLE, body)
