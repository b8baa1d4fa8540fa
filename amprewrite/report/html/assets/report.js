"use strict";
/* Draws the data that report/html/page.py collects. No library, no network. The data includes boxes and their layers, made by
   report/pictures/layout.py. The layout below is the `place` of that file, for the boxes that are open now. */
const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const N = D.nodes.length;
const nodes = D.nodes.map((d, id) => ({ id, name: d.n, op: d.o || d.p || d.n, colour: d.c, reason: d.r || "", why: d.w || "", dtype: d.d || "", shape: d.s || "-", module: d.m || "", source: d.f || "", flops: d.x || 0, bytes: d.b || 0, kind: d.k || "", role: d.p || "", weights: d.q || 0, flips: d.z || [], fp8: d.g || [], err: d.e || null }));
const boxes = D.boxes.map(([path, label, parent, parts, layers, chains], i) => ({ id: N + i, path, label, parent, parts, layers, chains, routes: new Map(chains.map((c) => [c[0] + ">" + c[c.length - 1], c])) }));
const box = (id) => boxes[id - N];
const isBox = (id) => id >= N;
const parentOf = new Int32Array(N + boxes.length).fill(-1);
for (const b of boxes) { parentOf[b.id] = b.parent; for (const p of b.parts) parentOf[p] = b.id; }
const edges = D.edges.map(([a, b, cast]) => ({ a, b, cast }));
const readers = nodes.map(() => []), feeders = nodes.map(() => []);
edges.forEach((e) => { readers[e.a].push(e); feeders[e.b].push(e); });

const way = (id) => { const found = []; for (let p = id; p >= 0; p = parentOf[p]) found.push(p); return found; };
const within = new Map();
function inside(id) {
  if (!isBox(id)) return [id];
  if (!within.has(id)) within.set(id, box(id).parts.flatMap(inside));
  return within.get(id);
}
const stats = new Map();
function stat(id) {
  if (!stats.has(id)) {
    const all = inside(id).map((n) => nodes[n]), ops = all.filter((n) => n.role === "op" || !n.role);
    const mine = new Set(all.map((n) => n.id));
    stats.set(id, { ops: ops.length, low: ops.filter((n) => n.colour === "low").length, high: ops.filter((n) => n.colour === "high").length,
      casts: D.casts.filter((c) => c[3].some((u) => mine.has(u))).length, heavy: D.heavy.filter((h) => mine.has(h)).length,
      flops: ops.reduce((s, n) => s + n.flops, 0), err: Math.max(0, ...all.map(errorOf)) });
  }
  return stats.get(id);
}
const errorOf = (n) => !n.err ? 0 : n.err.overflow ? 1e9 : n.err.accumulated === "inf" ? 1e9 : n.err.accumulated || 0;
const hasErrors = nodes.some((n) => n.err);

/* -- state ---------------------------------------------------------------------------- */
const root = N;
const S = { open: new Set([root]), at: null, hover: null, filter: null, mode: "precision", x: 0, y: 0, k: 1, rects: new Map(), passes: new Map(), gutters: new Map(), lines: [] };
const OPEN_AT_FIRST = 44;
/** Open modules while few enough parts are seen; siblings that are alike open together or not at all. */
function openSome(most) {
  S.open = new Set([root]);
  let seen = box(root).parts.length;
  const groups = [], grow = (id) => {
    const alike = new Map();
    for (const part of box(id).parts.filter(isBox)) { const s = stat(part), key = `${s.ops}|${s.low}|${s.high}|${s.casts}`; if (!alike.has(key)) alike.set(key, []); alike.get(key).push(part); }
    groups.push(...alike.values());
  };
  const weight = (group) => (stat(group[0]).high * (stat(group[0]).low > 0) + stat(group[0]).casts) * 4 - way(group[0]).length * 3;
  const more = (group) => group.reduce((s, id) => s + box(id).parts.length - 1, 0);
  grow(root);
  while (groups.length) {
    groups.sort((a, b) => weight(b) - weight(a));
    const fits = groups.findIndex((group) => seen + more(group) <= (seen < 12 ? 6 * most : most));
    if (fits < 0) return;
    const [group] = groups.splice(fits, 1);
    seen += more(group);
    for (const id of group) { S.open.add(id); grow(id); }
  }
}

/* -- layout ----------------------------------------------------------------------------- */
const GAP = 22, PASS = 8, ROW = 34, PAD = 16, HEAD = 30, SWEEPS = 6, GUTTER = 46, TALL = 760, ASPECT = 1.5;
const sizeOf = (id) => isBox(id) ? [206, 58] : nodes[id].role && nodes[id].role !== "op" ? [112, 30] : [164, 44];
function layout() {
  S.rects = new Map(); S.passes = new Map(); S.gutters = new Map();
  const sizes = new Map(), spots = new Map();
  const measure = (id) => {
    let size = sizeOf(id);
    if (isBox(id) && S.open.has(id)) { const b = box(id); b.parts.forEach(measure); const [spot, own] = spread(b, sizes); spots.set(id, spot); size = own; }
    sizes.set(id, size);
    return size;
  };
  const settle = (id, x, y) => {
    const [w, h] = sizes.get(id);
    S.rects.set(id, { x, y, w, h });
    if (!spots.has(id)) return;
    for (const [item, [left, top, height, gutter]] of spots.get(id)) {
      if (item < 0) { S.passes.set(id + ":" + item, [x + left, y + top, height, x + gutter]); continue; }
      S.gutters.set(item, x + gutter);
      settle(item, x + left, y + top);
    }
  };
  measure(root); settle(root, 0, 0); wire();
}
function spread(b, sizes) {
  const mid = new Map(), near = new Map(), width = new Map();
  const join = (a, c) => { if (!near.has(a)) near.set(a, []); near.get(a).push(c); };
  for (const c of b.chains) for (let i = 1; i < c.length; i++) { join(c[i - 1], c[i]); join(c[i], c[i - 1]); }
  for (const layer of b.layers) {
    for (const i of layer) width.set(i, i < 0 ? PASS : sizes.get(i)[0]);
    let left = -(layer.reduce((s, i) => s + width.get(i), 0) + GAP * (layer.length - 1)) / 2;
    for (const i of layer) { mid.set(i, left + width.get(i) / 2); left += width.get(i) + GAP; }
  }
  const mean = (i) => near.has(i) ? near.get(i).reduce((s, n) => s + mid.get(n), 0) / near.get(i).length : mid.get(i);
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const order = sweep % 2 ? [...b.layers].reverse() : b.layers;
    for (const layer of order) {
      const want = layer.map(mean), a = [], z = new Array(layer.length);
      let right = -Infinity, left = Infinity;
      layer.forEach((item, i) => { const w = width.get(item); right = Math.max(want[i] - w / 2, right) + w + GAP; a.push(right - GAP - w / 2); });
      for (let i = layer.length - 1; i >= 0; i--) { const w = width.get(layer[i]); left = Math.min(want[i] + w / 2, left) - w - GAP; z[i] = left + GAP + w / 2; }
      layer.forEach((item, i) => mid.set(item, (a[i] + z[i]) / 2));
    }
  }
  /* Long chains are set in columns, as text is: about as wide as high. */
  const heights = b.layers.map((layer) => Math.max(0, ...layer.filter((i) => i >= 0).map((i) => sizes.get(i)[1])) + ROW);
  const tall = heights.reduce((s, h) => s + h, 0), edge = (side) => Math[side < 0 ? "min" : "max"](...[...mid].map(([i, m]) => m + side * width.get(i) / 2));
  const broad = mid.size ? edge(1) - edge(-1) + GUTTER : GUTTER;
  const columns = tall > TALL ? Math.max(1, Math.min(Math.round(Math.sqrt(ASPECT * tall / broad)), Math.floor(tall / Math.max(...heights)))) : 1;
  const spots = new Map();
  let left = PAD, deepest = 0, at = 0, done = 0;
  for (let column = 0; column < columns && at < b.layers.length; column++) {
    const first = at;
    while (at < b.layers.length && (column === columns - 1 || at === first || done + heights[at] / 2 <= tall * (column + 1) / columns)) done += heights[at++];
    const mine = b.layers.slice(first, at).flat(), low = Math.min(...mine.map((i) => mid.get(i) - width.get(i) / 2)), high = Math.max(...mine.map((i) => mid.get(i) + width.get(i) / 2));
    let y = HEAD + PAD;
    for (let k = first; k < at; k++) {
      const height = heights[k] - ROW;
      for (const i of b.layers[k]) { const x = mid.get(i) - low + left; spots.set(i, i < 0 ? [x, y, height, left - GUTTER / 2] : [x - width.get(i) / 2, y + (height - sizes.get(i)[1]) / 2, 0, left - GUTTER / 2]); }
      y += heights[k];
    }
    deepest = Math.max(deepest, y - ROW);
    left += high - low + GUTTER;
  }
  return [spots, [Math.max(left - GUTTER + PAD, 190), deepest + PAD]];
}
function seenFor(id) { const w = way(id); for (let i = w.length - 1; i > 0; i--) if (!S.open.has(w[i])) return w[i]; return id; }
function wire() {
  const bundle = new Map();
  for (const e of edges) {
    const a = seenFor(e.a), b = seenFor(e.b);
    if (a === b) continue;
    const key = a * 1e7 + b;
    if (!bundle.has(key)) bundle.set(key, { a, b, all: [], casts: new Set(), low: 0 });
    const line = bundle.get(key);
    line.all.push(e); line.low += nodes[e.a].colour === "low";
    if (e.cast) line.casts.add(e.a + ":" + e.cast);
  }
  S.lines = [...bundle.values()];
  for (const line of S.lines) line.points = route(line.a, line.b);
}
function route(a, b) {
  const wa = way(a), wb = way(b), mine = new Map(wa.map((id, i) => [id, i]));
  const j = wb.findIndex((id) => mine.has(id)), meet = box(wb[j]), from = wa[mine.get(wb[j]) - 1], to = wb[j - 1];
  const ra = S.rects.get(a), rb = S.rects.get(b), points = [[ra.x + ra.w / 2, ra.y + ra.h]];
  if (from !== a) { const r = S.rects.get(from); points.push([ra.x + ra.w / 2, r.y + r.h]); }
  const chain = meet.routes.get(from + ">" + to);
  if (chain) for (const item of chain.slice(1, -1)) { const [x, y, h, gutter] = S.passes.get(meet.id + ":" + item); points.push([x, y, gutter], [x, y + h]); }
  const gutter = S.gutters.get(to);
  if (to !== b) { const r = S.rects.get(to); points.push([rb.x + rb.w / 2, r.y, gutter]); }
  points.push([rb.x + rb.w / 2, rb.y, gutter]);
  return points;
}

/* -- drawing ------------------------------------------------------------------------------ */
const canvas = $("graph"), g = canvas.getContext("2d");
let C = {}, dirty = false, frames = 0;
function readColours() {
  const style = getComputedStyle(document.documentElement), v = (n) => style.getPropertyValue("--" + n).trim();
  for (const n of ["bg", "surface", "sunk", "ink", "soft", "muted", "line", "low", "low-tint", "low-line", "high", "high-tint", "high-line", "cast", "cast-tint", "bad", "focus", "box", "edge"]) C[n] = v(n);
  C.sans = v("sans"); C.mono = v("mono");
}
function paint() { if (!dirty) { dirty = true; requestAnimationFrame(draw); } }
const cut = (text, width) => {
  if (g.measureText(text).width <= width) return text;
  let n = text.length;
  while (n > 1 && g.measureText(text.slice(0, n) + "…").width > width) n--;
  return text.slice(0, n) + "…";
};
const rounded = (r, radius) => { g.beginPath(); g.roundRect(r.x, r.y, r.w, r.h, radius); };
function tone(id) {
  if (S.mode === "precision") return null;
  const value = S.mode === "error" ? (isBox(id) ? stat(id).err : errorOf(nodes[id])) : (isBox(id) ? stat(id).flops : nodes[id].flops);
  if (!value) return [C.box, C.line];
  const t = S.mode === "error" ? Math.min(1, Math.max(.06, (Math.log10(value) + 5) / 5)) : Math.max(.06, Math.sqrt(value / (isBox(id) ? stat(root).flops : S.most)));
  const ink = S.mode === "error" ? C.bad : C.focus, part = Math.round(t * 72);
  return [`color-mix(in srgb, ${ink} ${part}%, ${C.surface})`, `color-mix(in srgb, ${ink} ${Math.min(100, part + 25)}%, ${C.surface})`];
}
S.most = Math.max(1, ...nodes.map((n) => n.flops));
const lit = (id) => !S.filter || inside(id).some((n) => S.filter.has(n));
function draw() {
  dirty = false; frames++;
  const ratio = devicePixelRatio || 1, w = canvas.clientWidth, h = canvas.clientHeight;
  if (canvas.width !== Math.round(w * ratio) || canvas.height !== Math.round(h * ratio)) { canvas.width = Math.round(w * ratio); canvas.height = Math.round(h * ratio); }
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.fillStyle = C.bg; g.fillRect(0, 0, w, h);
  g.setTransform(ratio * S.k, 0, 0, ratio * S.k, ratio * S.x, ratio * S.y);
  const view = { l: -S.x / S.k, t: -S.y / S.k, r: (w - S.x) / S.k, b: (h - S.y) / S.k };
  const seen = (r) => r.x < view.r && r.x + r.w > view.l && r.y < view.b && r.y + r.h > view.t;
  const near = S.at === null ? new Set() : new Set(S.lines.filter((l) => l.a === S.at || l.b === S.at));
  for (const [id, r] of S.rects) if (isBox(id) && S.open.has(id) && id !== root && seen(r)) drawOpen(id, r);
  for (const line of S.lines) if (!near.has(line)) drawLine(line, view, false);
  for (const line of near) drawLine(line, view, true);
  for (const [id, r] of S.rects) if (!(isBox(id) && S.open.has(id)) && seen(r)) isBox(id) ? drawClosed(id, r) : drawOp(id, r);
  if (S.k > .16) for (const line of S.lines) if (line.casts.size) drawCast(line, view);
  g.globalAlpha = 1;
}
function drawOpen(id, r) {
  const depth = way(id).length % 2;
  g.globalAlpha = lit(id) ? 1 : .35;
  rounded(r, 13); g.fillStyle = depth ? C.surface : C.box; g.fill();
  g.lineWidth = S.at === id ? 2.4 : 1; g.strokeStyle = S.at === id ? C.focus : C.line; g.stroke();
  if (S.k * 13 < 5) return;
  g.textBaseline = "middle"; g.textAlign = "left";
  g.fillStyle = C.muted; g.font = `10px ${C.sans}`; g.fillText("▾", r.x + 13, r.y + 18);
  g.fillStyle = C.soft; g.font = `600 12.5px ${C.sans}`;
  const label = cut(box(id).label || "model", r.w - 100);
  g.fillText(label, r.x + 26, r.y + 18);
  g.textAlign = "right"; g.fillStyle = C.muted; g.font = `11px ${C.sans}`;
  if (r.w > 170) g.fillText(plural(stat(id).ops, "op"), r.x + r.w - 14, r.y + 18);
  g.textAlign = "left";
}
function drawClosed(id, r) {
  const s = stat(id), t = tone(id);
  g.globalAlpha = lit(id) ? 1 : .22;
  if (S.k > .22) for (const d of [6, 3]) { rounded({ x: r.x + d, y: r.y + d, w: r.w - 2 * d, h: r.h }, 10); g.fillStyle = C.surface; g.fill(); g.strokeStyle = C.line; g.lineWidth = 1; g.stroke(); }
  rounded(r, 11); g.fillStyle = t ? t[0] : C.surface; g.fill();
  g.lineWidth = S.at === id ? 2.6 : S.hover === id ? 1.8 : 1.1; g.strokeStyle = S.at === id ? C.focus : S.hover === id ? C.soft : t ? t[1] : s.heavy ? C.high : C.edge; g.stroke();
  const share = s.low / Math.max(1, s.low + s.high), small = S.k < .36, bar = { x: r.x + 13, y: r.y + r.h - (small ? 24 : 13), w: r.w - 26, h: small ? 14 : 5 };
  g.save(); rounded(bar, 2.5); g.clip();
  g.fillStyle = C.high; g.fillRect(bar.x, bar.y, bar.w, bar.h); g.fillStyle = C.low; g.fillRect(bar.x, bar.y, bar.w * share - (share < 1 ? 1 : 0), bar.h); g.restore();
  if (S.k * 13 < 4.5) return;
  g.textBaseline = "middle"; g.textAlign = "left"; g.fillStyle = C.ink; g.font = `620 13px ${C.sans}`;
  g.fillText(cut(box(id).label || "model", r.w - 92), r.x + 13, r.y + 17);
  g.fillStyle = C.muted; g.font = `11px ${C.sans}`; g.textAlign = "right";
  g.fillText(plural(s.ops, "op"), r.x + r.w - 13, r.y + 17); g.textAlign = "left";
  if (S.k * 11 < 4.5) return;
  const parts = [s.high ? `${s.high} high` : "all low"]; if (!s.low) parts[0] = s.high ? "all high" : "no float op"; if (s.casts) parts.push(plural(s.casts, "cast"));
  g.fillStyle = s.high ? C.high : C.low; g.fillText(parts[0], r.x + 13, r.y + 34);
  if (parts[1]) { const x = r.x + 13 + g.measureText(parts[0]).width; g.fillStyle = C.cast; g.fillText("  ◆ " + parts[1], x, r.y + 34); }
}
function drawOp(id, r) {
  const n = nodes[id], low = n.colour === "low", edge = n.role && n.role !== "op", t = tone(id);
  g.globalAlpha = lit(id) ? 1 : .2;
  rounded(r, edge ? r.h / 2 : 8);
  g.fillStyle = edge ? C.sunk : t ? t[0] : S.k < .3 ? C[low ? "low-line" : "high"] : low ? C["low-tint"] : C["high-tint"]; g.fill();
  if (!edge) { g.save(); g.clip(); g.fillStyle = low ? C.low : C.high; g.fillRect(r.x, r.y, 5, r.h); g.restore(); rounded(r, 8); }
  g.lineWidth = S.at === id ? 2.8 : S.hover === id ? 2 : 1; g.strokeStyle = S.at === id ? C.focus : S.hover === id ? C.soft : edge ? C.edge : t ? t[1] : low ? C["low-line"] : C["high-line"]; g.stroke();
  if (S.k * 13 < 4.5) return;
  g.textBaseline = "middle"; g.textAlign = edge ? "center" : "left"; g.fillStyle = C.ink;
  if (edge) { g.font = `500 12px ${C.sans}`; g.fillText(cut(n.name.split("/").pop(), r.w - 22), r.x + r.w / 2, r.y + r.h / 2 + .5); return; }
  g.font = `600 12.5px ${C.sans}`; g.fillText(cut(n.op, r.w - 64), r.x + 14, r.y + 15);
  g.textAlign = "right"; g.font = `600 10.5px ${C.mono}`; g.fillStyle = low ? C.low : C.high; g.fillText(n.dtype, r.x + r.w - 10, r.y + 15.5);
  g.textAlign = "left"; g.fillStyle = C.muted; g.font = `10.5px ${C.mono}`;
  const weights = n.weights ? ` ◆${n.weights}` : "";
  g.fillText(cut(n.shape, r.w - 46), r.x + 14, r.y + 31);
  if (weights) { g.textAlign = "right"; g.fillStyle = C.cast; g.fillText(weights, r.x + r.w - 10, r.y + 31); }
  if (n.err && n.err.overflow) { g.beginPath(); g.arc(r.x + r.w - 2, r.y + 2, 6, 0, 7); g.fillStyle = C.bad; g.fill(); }
}
function trace(points) {
  g.beginPath(); g.moveTo(...points[0]);
  for (let i = 1; i < points.length; i++) {
    const [x0, y0] = points[i - 1], [x1, y1, gutter] = points[i];
    if (y1 < y0 && gutter !== undefined) { /* up the gutter to the next column */
      g.arcTo(x0, y0 + 15, gutter, y0 + 15, 8); g.arcTo(gutter, y0 + 15, gutter, y1 - 15, 10); g.arcTo(gutter, y1 - 15, x1, y1 - 15, 10); g.arcTo(x1, y1 - 15, x1, y1, 8); g.lineTo(x1, y1);
      continue;
    }
    if (Math.abs(x1 - x0) < .5 && y1 >= y0) { g.lineTo(x1, y1); continue; }
    const bend = y1 > y0 ? Math.min((y1 - y0) * .55, 60) : 60;
    g.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1);
  }
}
function drawLine(line, view, strong) {
  const p = line.points, top = Math.min(...p.map((q) => q[1])) - 70, bottom = Math.max(...p.map((q) => q[1])) + 70;
  if (top > view.b || bottom < view.t) return;
  const on = lit(line.a) && lit(line.b), all = line.low === line.all.length, low = line.low > 0;
  g.globalAlpha = on ? (strong ? 1 : .72) : .1;
  g.strokeStyle = strong ? C.focus : S.mode !== "precision" ? C.edge : all ? C.low : low ? C.edge : C.high;
  g.lineWidth = (strong ? 2.4 : 1.35) / Math.min(1, Math.max(S.k, .35)) ** .5;
  trace(p); g.stroke();
  if (S.k < .3) return;
  const [x, y] = p[p.length - 1];
  g.fillStyle = g.strokeStyle; g.beginPath(); g.moveTo(x, y); g.lineTo(x - 3.6, y - 7); g.lineTo(x + 3.6, y - 7); g.fill();
}
function drawCast(line, view) {
  const p = line.points, [x, y1] = p[p.length - 1], [x0, y0] = p[p.length - 2], y = y1 < y0 ? y1 - 9 : Math.max(y1 - 17, (y0 + y1) / 2);
  if (y < view.t - 20 || y > view.b + 20 || x < view.l - 80 || x > view.r + 20) return;
  const px = Math.abs(x - x0) < .5 || y1 < y0 ? x : x + (x0 - x) * .06;
  g.globalAlpha = lit(line.a) && lit(line.b) ? 1 : .15;
  const to = [...new Set([...line.casts].map((c) => c.split(":").pop()))].join(", "), size = 6.5 / Math.min(1, Math.max(S.k, .3)) ** .7;
  g.fillStyle = C.cast; g.strokeStyle = C.bg; g.lineWidth = 1.5;
  g.beginPath(); g.moveTo(px, y - size); g.lineTo(px + size, y); g.lineTo(px, y + size); g.lineTo(px - size, y); g.closePath(); g.fill(); g.stroke();
  if (S.k < .45) return;
  g.font = `600 10px ${C.mono}`; g.textAlign = "left"; g.textBaseline = "middle";
  const text = (line.casts.size > 1 ? line.casts.size + "× " : "") + to, w = g.measureText(text).width;
  g.globalAlpha *= .92; g.fillStyle = C["cast-tint"]; g.beginPath(); g.roundRect(px + 9, y - 7.5, w + 9, 15, 7); g.fill();
  g.fillStyle = C.cast; g.fillText(text, px + 13.5, y + .5);
}

/* -- moving about ------------------------------------------------------------------------------ */
function fitTo(r, most = 1.15) {
  const w = canvas.clientWidth, h = canvas.clientHeight;
  S.k = Math.max(.03, Math.min(most, (w - 60) / r.w, (h - 110) / r.h));
  S.x = w / 2 - (r.x + r.w / 2) * S.k; S.y = Math.max(30, h / 2 - 12 - (r.y + r.h / 2) * S.k);
  paint();
}
function fit() {
  const r = S.rects.get(root), h = canvas.clientHeight, readable = .62;
  fitTo(r);
  if (S.k < readable && r.h > r.w) { S.k = Math.max(S.k, Math.min(readable, (canvas.clientWidth - 60) / r.w)); S.x = canvas.clientWidth / 2 - (r.x + r.w / 2) * S.k; S.y = r.h * S.k < h - 80 ? (h - r.h * S.k) / 2 : 40; }
  paint();
}
const fitWhole = () => { fitTo(S.rects.get(root)); };
function centre(id) {
  const r = S.rects.get(id);
  S.k = Math.max(S.k, .8); S.x = canvas.clientWidth / 2 - (r.x + r.w / 2) * S.k; S.y = canvas.clientHeight / 2 - (r.y + r.h / 2) * S.k;
  paint();
}
function keepPlace(id, change) {
  const old = S.rects.get(id); change(); layout();
  const now = S.rects.get(id);
  if (old && now) { S.x += (old.x + old.w / 2 - now.x - now.w / 2) * S.k; S.y += (old.y - now.y) * S.k; }
  paint();
}
const toggle = (id) => { if (id !== root) keepPlace(id, () => S.open.has(id) ? S.open.delete(id) : S.open.add(id)); };
function reveal(id) { let changed = false; for (const p of way(id).slice(1)) if (!S.open.has(p)) { S.open.add(p); changed = true; } if (changed) layout(); }
function select(id, move = true) {
  reveal(id); S.at = id;
  if (move) centre(id); else paint();
  showNode(id); tab("node");
}
function at(event) {
  const b = canvas.getBoundingClientRect(), x = (event.clientX - b.left - S.x) / S.k, y = (event.clientY - b.top - S.y) / S.k;
  let found = null, depth = -1;
  for (const [id, r] of S.rects) if (id !== root && x >= r.x && x <= r.x + r.w && y >= r.y && y <= r.y + r.h) {
    const d = way(id).length, head = !(isBox(id) && S.open.has(id)) || y <= r.y + HEAD;
    if (head && d > depth) { found = id; depth = d; }
  }
  return found;
}
let drag = null;
canvas.addEventListener("pointerdown", (e) => { canvas.setPointerCapture(e.pointerId); drag = { x: e.clientX, y: e.clientY, moved: false }; });
canvas.addEventListener("pointermove", (e) => {
  if (drag) {
    const dx = e.clientX - drag.x, dy = e.clientY - drag.y;
    if (drag.moved || Math.hypot(dx, dy) > 4) { S.x += dx; S.y += dy; drag = { x: e.clientX, y: e.clientY, moved: true }; canvas.classList.add("drag"); $("tip").hidden = true; paint(); }
    return;
  }
  const id = at(e);
  if (id !== S.hover) { S.hover = id; canvas.classList.toggle("hit", id !== null); paint(); }
  tip(id, e);
});
canvas.addEventListener("pointerup", (e) => {
  const moved = drag && drag.moved; drag = null; canvas.classList.remove("drag");
  if (moved) return;
  const id = at(e);
  if (id === null) { S.at = null; paint(); return; }
  if (isBox(id)) { toggle(id); S.at = id; showModule(id); tab("node"); } else select(id, false);
});
canvas.addEventListener("pointerleave", () => { S.hover = null; $("tip").hidden = true; paint(); });
canvas.addEventListener("wheel", (e) => {
  e.preventDefault();
  const b = canvas.getBoundingClientRect(), x = e.clientX - b.left, y = e.clientY - b.top;
  if (e.ctrlKey || e.metaKey || (!e.shiftKey && Math.abs(e.deltaY) >= Math.abs(e.deltaX) && Math.abs(e.deltaX) < 1)) {
    const k = Math.min(3, Math.max(.02, S.k * Math.exp(-e.deltaY * .0016)));
    S.x = x - (x - S.x) * k / S.k; S.y = y - (y - S.y) * k / S.k; S.k = k;
  } else { S.x -= e.deltaX; S.y -= e.deltaY; }
  paint();
}, { passive: false });
function tip(id, e) {
  const el = $("tip");
  if (id === null) { el.hidden = true; return; }
  el.replaceChildren();
  const add = (tag, text) => { const t = document.createElement(tag); t.textContent = text; el.append(t); };
  if (isBox(id)) { const s = stat(id); add("b", box(id).path || "model"); add("div", `${plural(s.ops, "op")}: ${s.low} low, ${s.high} high`); add("span", `${plural(s.casts, "activation cast")} · click to ${S.open.has(id) ? "close" : "open"}`); }
  else { const n = nodes[id]; add("b", n.name); if (n.role === "op" || !n.role) { add("div", `runs ${n.colour} (${n.dtype}) because ${n.why}`); } add("span", n.source || n.role); }
  el.hidden = false;
  const b = canvas.getBoundingClientRect();
  el.style.left = Math.min(e.clientX - b.left + 14, b.width - el.offsetWidth - 8) + "px";
  el.style.top = Math.min(e.clientY - b.top + 16, b.height - el.offsetHeight - 8) + "px";
}

/* -- panels --------------------------------------------------------------------------------------- */
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const amount = (n, unit = "") => { for (const [s, p] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (n >= s) return `${+(n / s).toPrecision(3)} ${p}${unit}`; return `${n} ${unit}`; };
const percent = (a, b) => !b ? "–" : a === b ? "100 %" : `${Math.min(99.9, 100 * a / b).toFixed(a / b > .99 || a / b < .1 ? 1 : 0)} %`;
const make = (tag, set = {}, ...inner) => { const e = document.createElement(tag); for (const [k, v] of Object.entries(set)) k === "class" ? (e.className = v) : k.startsWith("on") ? e.addEventListener(k.slice(2), v) : k === "style" ? (e.style.cssText = v) : e.setAttribute(k, v); e.append(...inner.filter((i) => i !== null && i !== undefined && i !== "")); return e; };
const card = (title, note, ...inner) => make("section", { class: "card" }, make("h3", {}, title, note ? make("small", {}, note) : ""), ...inner);
function tab(name) {
  for (const t of ["overview", "node"]) { $("tab-" + t).setAttribute("aria-selected", String(t === name)); $(t).hidden = t !== name; }
  if (name === "node") document.querySelector("aside").scrollTop = 0;
}
$("tab-overview").onclick = () => tab("overview"); $("tab-node").onclick = () => tab("node");
function hbar(label, value, whole, colour, onclick) {
  return make(onclick ? "button" : "div", { class: "hbar", ...(onclick ? { onclick } : {}) }, make("span", {}, label), make("em", {}, String(value)), make("u", {}, make("i", { style: `width:${whole ? 100 * value / whole : 0}%;background:var(--${colour})` })));
}
function overview() {
  const [lowOps, highOps] = D.share.ops, [lowFlops, highFlops] = D.share.FLOPs;
  const tile = (big, small, text) => make("div", { class: "tile" }, make("b", {}, big, small ? make("small", {}, " " + small) : ""), make("span", {}, text));
  const flops = lowFlops + highFlops;
  const tiles = make("div", { class: "tiles" },
    tile(flops ? percent(lowFlops, flops) : "–", "", `of FLOPs run in ${D.low}`), tile(String(lowOps), `of ${lowOps + highOps}`, "ops run low"),
    tile(String(D.casts.length), "", D.casts.length === 1 ? "activation cast" : "activation casts"), D.error !== null ? tile(D.error === "inf" ? "∞" : D.error.toExponential(1), "", "output error, relative L2") : tile(String(D.weights), "", "low copies of weights"));
  const heavy = card("Heavy ops left in fp32", D.heavy.length ? String(D.heavy.length) : "", ...(D.heavy.length
    ? D.heavy.slice(0, 12).map((id) => { const n = nodes[id]; return make("button", { class: "warn", onclick: () => select(id) }, make("b", {}, n.name), ` · ${amount(n.flops, "FLOP")}`, make("span", {}, `because ${n.why}`), n.flips[0] ? make("span", {}, n.flips[0]) : ""); })
    : [make("div", { class: "good" }, "✓", flops ? ` Every matmul and convolution runs in ${D.low}` : " The plan has no matmul and no convolution")]),
    D.heavy.length > 12 ? make("p", { class: "note" }, `and ${D.heavy.length - 12} more`) : "");
  const stacks = Object.entries(D.share).filter(([, [a, b]]) => a + b).map(([name, [a, b]]) => make("div", { class: "stack", title: `${amount(a)} low, ${amount(b)} high` }, name, make("div", { class: "bar" }, make("div", { class: "l", style: `flex:${a}` }), make("div", { class: "h", style: `flex:${b}` })), make("em", {}, percent(a, a + b))));
  const kinds = Object.entries(D.kinds), most = Math.max(1, ...kinds.map((k) => k[1]));
  const reasons = new Map();
  for (const n of nodes) if (n.role === "op" || !n.role) { const key = n.colour + "|" + n.reason; if (!reasons.has(key)) reasons.set(key, []); reasons.get(key).push(n.id); }
  const sorted = [...reasons].sort((a, b) => b[1].length - a[1].length);
  $("overview").replaceChildren(...[tiles, heavy, card("Low share", `low = ${D.low}`, ...stacks),
    card("Casts by kind", `${kinds.reduce((s, k) => s + k[1], 0)} in all`, ...kinds.map(([k, v]) => hbar(k, v, most, "cast"))),
    card("Reasons", "click to filter", ...sorted.map(([key, ids]) => { const [c, r] = key.split("|"); return hbar(make("span", {}, `${c} `, make("s", {}, r)), ids.length, sorted[0][1].length, c === "low" ? "low" : "high", () => filter(ids, `${c}: ${r}`)); })),
    hasErrors ? card("Error by depth", "relative L2 against fp32, log scale", errorChart()) : "",
    D.casts.length ? card("Activation casts", String(D.casts.length), make("div", { class: "list" }, ...D.casts.slice(0, 200).map((c) => make("button", { title: c[1] + " → " + c[2], onclick: () => select(c[3].length ? c[3][0] : c[0]) }, c[1], make("i", {}, " → " + c[2]), c[3].length ? ` for ${nodes[c[3][0]].name}${c[3].length > 1 ? " +" + (c[3].length - 1) : ""}` : "")))) : "",
    D.skipped.length ? card("Left out of the graphs", "", make("div", { class: "list" }, ...D.skipped.map(([where, why]) => make("p", {}, make("b", {}, where), ": " + why)))) : "",
    D.notes.length ? card("Notes", "", ...D.notes.map((n) => make("p", { class: "note" }, n))) : ""].filter(Boolean));
}
function errorChart() {
  const W = 346, H = 132, L = 34, B = 16, ns = "http://www.w3.org/2000/svg";
  const el = (tag, set) => { const e = document.createElementNS(ns, tag); for (const [k, v] of Object.entries(set)) e.setAttribute(k, v); return e; };
  const found = nodes.filter((n) => n.err && n.err.accumulated !== undefined && (n.role === "op" || !n.role));
  const value = (n) => n.err.accumulated === "inf" ? Infinity : n.err.accumulated;
  const finite = found.map(value).filter((v) => v > 0 && isFinite(v)).map(Math.log10);
  const lo = Math.floor(Math.min(-4, ...finite)), hi = Math.ceil(Math.max(lo + 1, ...finite));
  const x = (i) => L + (W - L - 6) * (found.length > 1 ? i / (found.length - 1) : .5), y = (v) => 8 + (H - B - 8) * (1 - (Math.min(hi, Math.max(lo, v > 0 ? Math.log10(v) : lo)) - lo) / (hi - lo));
  const svg = el("svg", { class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "Error of every op against fp32, in running order" });
  for (let d = lo; d <= hi; d++) { const label = el("text", { x: L - 6, y: y(10 ** d) + 3, "text-anchor": "end" }); label.textContent = `1e${d}`; svg.append(el("line", { class: "grid", x1: L, x2: W, y1: y(10 ** d), y2: y(10 ** d) }), label); }
  svg.append(el("path", { class: "line", d: found.map((n, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(value(n)).toFixed(1)}`).join("") }));
  found.forEach((n, i) => { if (found.length > 400 && !n.err.overflow && i % Math.ceil(found.length / 300)) return; const c = el("circle", { cx: x(i), cy: y(value(n)), r: n.err.overflow ? 4.5 : found.length > 120 ? 1.8 : 2.6, class: n.err.overflow ? "x" : n.colour === "low" ? "l" : "" }); const t = el("title", {}); t.textContent = `${n.name}: ${n.err.accumulated}`; c.append(t); c.addEventListener("click", () => select(n.id)); svg.append(c); });
  const foot = el("text", { x: W, y: H - 1, "text-anchor": "end" }); foot.textContent = "running order →"; svg.append(foot);
  return svg;
}
function code(text) {
  const button = make("button", { title: "Copy" }, "copy");
  button.onclick = async () => { try { await navigator.clipboard.writeText(text); button.textContent = "copied"; } catch { getSelection().selectAllChildren(button.previousSibling); button.textContent = "selected"; } setTimeout(() => { button.textContent = "copy"; }, 1400); };
  return make("code", {}, make("span", {}, text), button);
}
function flip(text) {
  const m = text.match(/^(.*?)(overrides=\{.*?\})( gives (.*))?$/);
  if (!m) return make("div", { class: "flip" }, text[0].toUpperCase() + text.slice(1));
  const before = m[1].replace(/[:,\s]+$/, "");
  return make("div", { class: "flip" }, before[0].toUpperCase() + before.slice(1), code(m[2]), m[4] ? make("small", {}, m[4]) : "");
}
function crumbs(path) { const parts = path.split("."); return parts.map((p, i) => make("button", { onclick: () => focusModule(parts.slice(0, i + 1).join(".")) }, (i ? "." : "") + p)); }
const links = (ids) => { const shown = [...new Set(ids)]; return [...shown.slice(0, 14).map((id) => make("button", { onclick: () => select(id) }, nodes[id].name)), shown.length > 14 ? `and ${shown.length - 14} more` : ""]; };
function showNode(id) {
  const n = nodes[id], op = n.role === "op" || !n.role, e = n.err || {};
  const facts = [["shape", n.shape, "mono"], ["result", n.bytes ? amount(n.bytes, "B") : ""], ["cost", n.flops ? `${amount(n.flops, "FLOP")}${stat(root).flops ? `, ${percent(n.flops, stat(root).flops)} of the model` : ""}` : ""], ["list", n.kind], ["op", n.op, "mono"], ["weights", n.weights ? plural(n.weights, "low copy").replace("copys", "copies") : ""]];
  const rows = facts.filter((f) => f[1]).flatMap(([k, v, c]) => [make("dt", {}, k), make("dd", { class: c || "" }, v)]);
  const casts = [...new Set(feeders[id].filter((x) => x.cast).map((x) => `reads ${nodes[x.a].name} as ${x.cast}`)), ...new Set(readers[id].filter((x) => x.cast).map((x) => `is copied to ${x.cast}`))];
  if (feeders[id].length) rows.push(make("dt", {}, "reads"), make("dd", {}, ...links(feeders[id].map((x) => x.a))));
  if (readers[id].length) rows.push(make("dt", {}, "read by"), make("dd", {}, ...links(readers[id].map((x) => x.b))));
  if (casts.length) rows.push(make("dt", {}, "casts"), make("dd", {}, casts.join("; ")));
  if (n.fp8.length) rows.push(make("dt", {}, "fp8"), make("dd", {}, n.fp8.join("; ")));
  const show = (v) => v === "inf" ? "∞" : v === 0 ? "0" : Math.abs(v) < 1e-2 || Math.abs(v) >= 1e5 ? v.toExponential(2) : String(+v.toPrecision(4));
  const words = { introduced: "error introduced", inherited: "error inherited", accumulated: "error so far", largest: "largest value", smallest: "smallest value", overflow: "overflow", underflow: "underflow" };
  const numbers = Object.entries(words).filter(([k]) => e[k] !== undefined).flatMap(([k, word]) => [make("dt", {}, word), make("dd", { class: k === "overflow" && e[k] ? "bad" : "" }, k.endsWith("flow") ? (e[k] ? `${(100 * e[k]).toPrecision(3)} % of values` : "none") : show(e[k]))]);
  $("node").replaceChildren(make("div", { class: "head" }, make("span", { class: "pill " + (op ? n.colour : "plain") }, op ? `${n.colour} · ${n.dtype}` : n.role), e.overflow ? make("span", { class: "pill bad" }, "overflows") : "", make("h2", {}, n.name), n.module ? make("div", { class: "sub" }, ...crumbs(n.module)) : "", n.source ? make("div", { class: "sub" }, n.source) : ""),
    op ? make("div", { class: "why " + n.colour }, `Runs ${n.colour} because ${n.why}.`) : make("div", { class: "why" }, n.why ? n.why[0].toUpperCase() + n.why.slice(1) + "." : "Hands values out of the graph."),
    n.flips.length ? card("What would change it", "", ...n.flips.map(flip)) : op ? card("What would change it", "", make("p", { class: "note" }, "Its neighbours decide. plan.explain() on a fresh plan tries out which.")) : "",
    card("Facts", "", make("dl", {}, ...rows)), numbers.length ? card("Numbers under strict rounding", "", make("dl", {}, ...numbers)) : "");
}
function showModule(id) {
  const s = stat(id), b = box(id), ids = inside(id);
  const high = ids.filter((i) => nodes[i].colour === "high" && nodes[i].role === "op");
  $("node").replaceChildren(make("div", { class: "head" }, make("span", { class: "pill plain" }, "module"), make("h2", {}, b.label || "model"), b.path ? make("div", { class: "sub" }, ...crumbs(b.path)) : ""),
    card("Facts", "", make("dl", {}, ...[["ops", `${s.ops}: ${s.low} low, ${s.high} high`], ["casts", plural(s.casts, "activation cast")], ["cost", s.flops ? `${amount(s.flops, "FLOP")}, ${percent(s.flops, stat(root).flops)} of the model` : "no matmul or convolution"]].flatMap(([k, v]) => [make("dt", {}, k), make("dd", {}, v)]))),
    card("Keep it in fp32", "", make("div", { class: "flip" }, "All of it", code(`overrides={'module:${b.path}': 'fp32'}`))),
    high.length ? card("High inside", String(high.length), make("dl", {}, make("dt", {}, "ops"), make("dd", {}, ...links(high)))) : "");
}
function filter(ids, label) {
  S.filter = ids ? new Set(ids) : null;
  $("filter").hidden = !ids;
  if (ids) $("filter").replaceChildren(make("span", {}, `${label} (${ids.length})`), make("button", { "aria-label": "Clear filter", onclick: () => filter(null) }, "×"));
  for (const row of document.querySelectorAll(".row.on")) row.classList.remove("on");
  paint();
}
function focusModule(path) {
  const ids = nodes.filter((n) => n.module === path || n.module.startsWith(path + ".")).map((n) => n.id);
  if (!ids.length) return;
  reveal(ids[0]);
  const own = boxes.find((b) => b.path === path || (b.path + "." + b.label).endsWith(path) && b.path === path);
  if (own && !S.open.has(own.id)) { S.open.add(own.id); layout(); }
  filter(ids, path);
  const rs = ids.map((i) => S.rects.get(seenFor(i))), l = Math.min(...rs.map((r) => r.x)), t = Math.min(...rs.map((r) => r.y));
  fitTo({ x: l, y: t, w: Math.max(...rs.map((r) => r.x + r.w)) - l, h: Math.max(...rs.map((r) => r.y + r.h)) - t });
  for (const row of document.querySelectorAll(".row")) row.classList.toggle("on", row.dataset.path === path);
}
function tree() {
  const shut = new Set(), rows = D.modules.map(([depth, path, name, ops, low, high, casts, weights, flops, lowFlops], i) => ({ depth, path, name: name || "model", ops, low, high, casts, i, more: i + 1 < D.modules.length && D.modules[i + 1][0] > depth }));
  if (rows.length > 60) rows.forEach((r) => { if (r.more && r.depth > 1) shut.add(r.i); });
  const render = () => {
    let hide = Infinity;
    $("tree").replaceChildren(...rows.flatMap((r) => {
      if (r.depth > hide) return [];
      hide = shut.has(r.i) ? r.depth : Infinity;
      const mark = make("i", {}, r.more ? (shut.has(r.i) ? "▸" : "▾") : "");
      mark.onclick = (e) => { if (!r.more) return; e.stopPropagation(); shut.has(r.i) ? shut.delete(r.i) : shut.add(r.i); render(); };
      const row = make("button", { class: "row", title: `${r.path || "model"}: ${r.low} low, ${r.high} high, ${plural(r.casts, "activation cast")}`, onclick: () => r.path ? focusModule(r.path) : (filter(null), fit()) },
        make("span", { class: "label", style: `padding-left:${r.depth * 11}px` }, mark, r.name), make("span", { class: "casts" }, r.casts ? `◆${r.casts}` : ""), make("span", { class: "bar" }, make("span", { class: "l", style: `flex:${r.low}` }), make("span", { class: "h", style: `flex:${r.high}` })));
      row.dataset.path = r.path;
      return [row];
    }));
  };
  render();
}

/* -- search, keys, buttons ---------------------------------------------------------------------------- */
let hits = [], pick = 0;
function look() {
  const words = $("search").value.trim().toLowerCase().split(/\s+/).filter(Boolean), list = $("hits");
  if (!words.length) { list.hidden = true; hits = []; return; }
  const has = (text) => words.every((w) => text.includes(w));
  const modules = D.modules.filter((m) => m[1] && has(m[1].toLowerCase())).slice(0, 4).map((m) => ({ path: m[1] }));
  const rank = (n) => (n.name.toLowerCase() === words[0] ? 0 : n.name.toLowerCase().startsWith(words[0]) ? 1 : 2);
  const ops = nodes.filter((n) => has(`${n.name} ${n.op} ${n.module} ${n.source} ${n.why} ${n.colour} ${n.dtype}`.toLowerCase())).sort((a, b) => rank(a) - rank(b) || a.id - b.id);
  hits = [...ops.slice(0, 12).map((n) => ({ id: n.id })), ...modules]; pick = 0;
  list.replaceChildren(...hits.map((hit, i) => make("li", { role: "option", onclick: () => go(i) }, ...(hit.path ? [make("span", {}, "▤ " + hit.path)] : [make("span", { style: `color:var(--${nodes[hit.id].colour === "low" ? "low" : "high"})` }, "■"), make("span", {}, nodes[hit.id].name), make("small", {}, nodes[hit.id].module)]))),
    hits.length ? (ops.length > 12 ? make("li", { class: "none" }, make("span", {}, `${ops.length} ops in all`), make("button", { onclick: () => { filter(ops.map((n) => n.id), $("search").value); list.hidden = true; } }, "show them")) : "") : make("li", { class: "none" }, "nothing is called so"));
  list.hidden = false; mark();
}
const mark = () => [...$("hits").children].forEach((li, i) => li.setAttribute("aria-selected", String(i === pick && i < hits.length)));
function go(i) { const hit = hits[i]; if (!hit) return; $("hits").hidden = true; $("search").blur(); hit.path ? focusModule(hit.path) : select(hit.id); }
$("search").addEventListener("input", look); $("search").addEventListener("focus", look);
$("search").addEventListener("keydown", (e) => {
  if (e.key === "ArrowDown" || e.key === "ArrowUp") { e.preventDefault(); pick = Math.max(0, Math.min(hits.length - 1, pick + (e.key === "ArrowDown" ? 1 : -1))); mark(); }
  if (e.key === "Enter") go(pick);
  if (e.key === "Escape") { $("hits").hidden = true; $("search").blur(); }
});
document.addEventListener("click", (e) => { if (!e.target.closest(".search")) $("hits").hidden = true; });
document.addEventListener("keydown", (e) => {
  if (e.target.tagName === "INPUT" || e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.key === "/") { e.preventDefault(); $("search").focus(); }
  else if (e.key === "f") fitWhole();
  else if (e.key === "e") openAll();
  else if (e.key === "Escape") { filter(null); S.at = null; paint(); }
  else if (e.key.startsWith("Arrow") && S.at !== null && !isBox(S.at) && document.activeElement === canvas) {
    e.preventDefault();
    const next = { ArrowDown: () => readers[S.at].map((x) => x.b), ArrowUp: () => feeders[S.at].map((x) => x.a), ArrowRight: () => [Math.min(N - 1, S.at + 1)], ArrowLeft: () => [Math.max(0, S.at - 1)] }[e.key]();
    if (next.length) select(next[0]);
  }
});
function openAll() { S.open = new Set(boxes.map((b) => b.id)); layout(); fitWhole(); }
$("open").onclick = openAll;
$("close").onclick = () => { S.open = new Set([root]); layout(); fit(); };
$("fit").onclick = fitWhole;
function setTheme(dark) { document.documentElement.dataset.theme = dark ? "dark" : "light"; readColours(); paint(); }
$("theme").onclick = () => setTheme(document.documentElement.dataset.theme !== "dark");
const prefers = matchMedia("(prefers-color-scheme: dark)");
prefers.addEventListener("change", (e) => setTheme(e.matches));
function modes() {
  const all = [["precision", "Precision"], ["cost", "FLOPs"], ...(hasErrors ? [["error", "Error"]] : [])];
  $("mode").replaceChildren(...all.map(([key, text]) => make("button", { "aria-pressed": String(S.mode === key), onclick: () => { S.mode = key; modes(); legend(); paint(); } }, text)));
}
function legend() {
  const item = (colour, text, c = "") => make("span", {}, make("b", { class: c, style: `background:var(--${colour})` }), text);
  $("legend").replaceChildren(...(S.mode === "precision" ? [item("low", `low (${D.low})`), item("high", "high (fp32)"), item("cast", "cast", "d")] : S.mode === "cost" ? [item("focus", "darker: more FLOPs"), item("cast", "cast", "d")] : [item("bad", "darker: larger error against fp32"), item("cast", "cast", "d")]));
}

$("title").textContent = D.title; document.title = `${D.title} · cast plan`;
$("subtitle").textContent = `low = ${D.low} · lists = ${D.lists} · ${D.mode} · ${plural(D.share.ops[0] + D.share.ops[1], "op")} in ${plural(D.graphs, "graph")}`;
setTheme(prefers.matches); modes(); legend(); overview(); tree();
$("node").replaceChildren(make("p", { class: "empty" }, "Click an op or a module in the graph."));
openSome(OPEN_AT_FIRST); layout(); fit();
new ResizeObserver(paint).observe(canvas);
draw();
window.amprewriteReport = { state: S, nodes, boxes, select, toggle, openAll, filter, focusModule, setTheme, fitWhole, draw, frames: () => frames, byName: (name) => nodes.find((n) => n.name === name), screen: (id) => { const r = S.rects.get(id), b = canvas.getBoundingClientRect(); return [b.left + S.x + (r.x + r.w / 2) * S.k, b.top + S.y + (r.y + Math.min(r.h / 2, 14)) * S.k]; } };
performance.mark("ready");
