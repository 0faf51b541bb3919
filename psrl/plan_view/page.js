// Draws the plan in #plan: the tree as an icicle, executions as slices, bytes as stacked areas.
"use strict";
(() => {
  const plan = JSON.parse(document.getElementById("plan").textContent);
  const runs = plan.runs, batches = plan.micro_batches, done = plan.executions;
  const count = done.micro_batch.length;
  const total = count ? done.start[count - 1] + done.flops[count - 1] : 1;
  const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);
  const depth = largest(runs.x.map((x, i) => x + runs.tokens[i]));
  const leaves = largest(runs.y.map((y, i) => y + runs.height[i]));
  const peak = largest(done.kv.map((kv, i) => kv + done.grads[i]));
  const tip = document.getElementById("tip");
  let selected = -1;

  const comma = (n) => Math.round(n).toLocaleString("en-US");
  const color = (index, alpha) => {
    const hue = (index * 137.508) % 360;
    return `hsla(${hue}, 62%, ${batches[index].spine ? 38 : 66}%, ${alpha})`;
  };
  const alphaOf = (index) => (selected < 0 || selected === index ? 1 : 0.12);

  function prepare(id) {
    const canvas = document.getElementById(id), scale = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const ctx = canvas.getContext("2d");
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.clearRect(0, 0, width, height);
    return { canvas, ctx, width, height };
  }

  function drawTree() {
    const { ctx, width, height } = prepare("tree");
    for (let i = 0; i < runs.x.length; i++) {
      const w = (runs.tokens[i] / depth) * width, h = (runs.height[i] / leaves) * height;
      ctx.fillStyle = color(runs.micro_batch[i], alphaOf(runs.micro_batch[i]));
      ctx.fillRect((runs.x[i] / depth) * width, (runs.y[i] / leaves) * height, Math.max(w, 0.5),
        Math.max(h > 3 ? h - 1 : h, 0.5));
    }
  }

  function drawTime() {
    const { ctx, width, height } = prepare("time");
    const row = height / 2;
    for (let i = 0; i < count; i++) {
      const x = (done.start[i] / total) * width, w = (done.flops[i] / total) * width;
      ctx.fillStyle = color(done.micro_batch[i], alphaOf(done.micro_batch[i]));
      ctx.fillRect(x, done.backward[i] ? row + 2 : 2, Math.max(w > 3 ? w - 0.5 : w, 0.5), row - 4);
      if (i && done.wave[i] !== done.wave[i - 1]) {
        ctx.fillStyle = "#111827";
        ctx.fillRect(x - 0.5, 0, 1, height);
      }
    }
  }

  function area(ctx, width, height, of, fill) {
    const y = (bytes) => height - (peak ? bytes / peak : 0) * (height - 20);
    ctx.beginPath();
    ctx.moveTo(0, height);
    for (let i = 0; i < count; i++) {
      const [during, after] = of(i);
      const begin = (done.start[i] / total) * width, end = ((done.start[i] + done.flops[i]) / total) * width;
      ctx.lineTo(begin, y(during));
      ctx.lineTo(end, y(during));
      ctx.lineTo(end, y(after));
    }
    ctx.lineTo(width, height);
    ctx.closePath();
    ctx.fillStyle = fill;
    ctx.fill();
  }

  function drawBytes() {
    const { ctx, width, height } = prepare("bytes");
    area(ctx, width, height, (i) => [done.kv[i] + done.grads[i], done.kv_after[i] + done.grads_after[i]], "#d97706");
    area(ctx, width, height, (i) => [done.kv[i], done.kv_after[i]], "#2563eb");
    ctx.fillStyle = "#6b7280";
    ctx.font = "11px system-ui, sans-serif";
    ctx.fillText(`peak ${comma(peak)} bytes`, 6, 13);
  }

  function draw() {
    drawTree();
    drawTime();
    drawBytes();
  }

  // ------------------------------------------------------------------------------------------------ pointing at things
  function runAt(fx, fy) {
    const x = fx * depth, y = fy * leaves;
    for (let i = 0; i < runs.x.length; i++) {
      if (x >= runs.x[i] && x < runs.x[i] + runs.tokens[i] && y >= runs.y[i] && y < runs.y[i] + runs.height[i]) {
        return i;
      }
    }
    return -1;
  }

  function executionAt(fx) {
    let low = 0, high = count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (done.start[middle] <= fx * total) low = middle;
      else high = middle - 1;
    }
    return count ? low : -1;
  }

  function nameOf(index) {
    const b = batches[index];
    return `${b.spine ? "Spine" : "Leaf"} micro-batch ${index}: ${comma(b.tokens)} tokens, reads ${comma(b.path)}, ` +
      `${comma(b.rows)} logit rows`;
  }

  function describe(id, fx, fy) {
    if (id === "tree") {
      const i = runAt(fx, fy);
      if (i < 0) return null;
      const text = runs.text[i] ? `\n${runs.text[i]}` : "";
      return { index: runs.micro_batch[i], text: `${nameOf(runs.micro_batch[i])}\nTokens ${comma(runs.x[i])} to ` +
        `${comma(runs.x[i] + runs.tokens[i])}${text}` };
    }
    const i = executionAt(fx);
    if (i < 0) return null;
    return { index: done.micro_batch[i], text: `${nameOf(done.micro_batch[i])}\n` +
      `Pass ${done.backward[i] ? 2 : 1}, wave ${done.wave[i]}, ${done.flops[i].toExponential(2)} FLOPs\n` +
      `Blocks: ${done.reads[i]} read, ${done.writes[i]} written, ${done.frees[i]} freed\n` +
      `${comma(done.kv[i])} bytes of K/V, ${comma(done.grads[i])} of gradients` };
  }

  for (const id of ["tree", "time", "bytes"]) {
    const canvas = document.getElementById(id);
    const found = (event) => {
      const box = canvas.getBoundingClientRect();
      return describe(id, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    };
    canvas.addEventListener("mousemove", (event) => {
      const what = found(event);
      tip.style.display = what ? "block" : "none";
      if (!what) return;
      tip.textContent = what.text;
      tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
      tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
    });
    canvas.addEventListener("mouseleave", () => { tip.style.display = "none"; });
    canvas.addEventListener("click", (event) => {
      const what = found(event);
      selected = what && what.index !== selected ? what.index : -1;
      draw();
    });
  }
  window.addEventListener("resize", draw);
  draw();
  window.psrlPlan = { runs: runs.x.length, executions: count, peakBytes: peak, select: (i) => { selected = i; draw(); } };
})();
