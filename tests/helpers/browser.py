"""A page as a person has it in front of them: a real browser, light or dark, and how well its text stands out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def opened(browser: Browser, page_file: Path, scheme: str) -> tuple[Page, list[str]]:
    """The page in a light or a dark browser, and the messages of its console and its network."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1100, "height": 900})
    page = context.new_page()
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: messages.append(request.url) if "file://" not in request.url else None)
    page.goto(page_file.as_uri())
    return page, messages


# every visible text against the nearest painted ground behind it: WCAG 2 contrast
WORST_CONTRAST = """() => {
  const light = c => c.map(x => x / 255).map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
    .reduce((sum, x, n) => sum + x * [.2126, .7152, .0722][n], 0);
  const parse = css => css.match(/[\\d.]+/g).map(Number);
  const ground = e => { for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c.slice(0, 3); }
    return [255, 255, 255]; };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let worst = [99, ''];
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || e.closest('svg')) continue;
    const pair = [light(parse(getComputedStyle(e).color).slice(0, 3)), light(ground(e))];
    const ratio = (Math.max(...pair) + .05) / (Math.min(...pair) + .05);
    if (ratio < worst[0]) worst = [ratio, e.outerHTML.slice(0, 200)];
  }
  for (const e of document.querySelectorAll('svg [style*="var(--soft)"], svg [style*="var(--plot"]')) {
    const paint = getComputedStyle(e); const colour = paint.stroke !== 'none' ? paint.stroke : paint.fill;
    const pair = [light(parse(colour).slice(0, 3)), light(ground(e.closest('figure')))];
    const ratio = (Math.max(...pair) + .05) / (Math.min(...pair) + .05) * 1.5;  // lines: 3 is enough
    if (ratio < worst[0]) worst = [ratio, e.outerHTML.slice(0, 200)];
  }
  return worst;
}"""
