"""Opens a page of `tqc report` in headless Chromium and checks what only a browser can see.

    python3 tests/oracle/check_report.py report.html [--screenshots DIR] [--need-chromium] [--self-test]

Checks: the page is well-formed XML; in light and dark, at 1280 and 390 pixels: nothing is written to the console, the
page is not wider than the screen, text has a contrast of at least 4.5 (drawn lines and markers 3), text in charts is at
least 9 pixels high, every table scrolls inside its own box, and every place that scrolls can be reached with the
keyboard. Without Chromium it says that it skips and ends with 0; `--need-chromium` makes that an error. `--self-test`
damages the page in several ways, each of which must be noticed. Needs nothing but Python's standard library.
"""

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

BROWSERS = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
WIDTHS = [1280, 390]
THEMES = {"light": 1, "dark": 0}

# Runs in a copy of the page whose policy allows it; what it finds is left in the title.
PROBE = r"""
(() => {
  const found = [];
  const scheme = matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';
  if (scheme !== WANTED) found.push('the browser shows ' + scheme);
  for (const details of document.querySelectorAll('details')) details.open = true;
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) {
    const wide = [...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll table')
      && e.getBoundingClientRect().right > root.clientWidth + 1).slice(0, 3);
    found.push(`the page is ${root.scrollWidth} wide on ${root.clientWidth}: ` + wide.map(e => e.outerHTML.slice(0, 80)));
  }
  const parse = text => {
    const numbers = text.match(/[\d.]+/g).map(Number);
    return { rgb: numbers.slice(0, 3), alpha: numbers.length > 3 ? numbers[3] : 1 };
  };
  const light = rgb => {
    const [r, g, b] = rgb.map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [x, y] = [light(a), light(b)];
    return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
  };
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.alpha > 0) return colour.rgb;
    }
    return [255, 255, 255];
  };
  const seen = new Set();
  const tell = text => { if (!seen.has(text)) { seen.add(text); found.push(text); } };
  for (const e of document.querySelectorAll('body *')) {
    const style = getComputedStyle(e);
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (own && !['title', 'desc', 'TITLE', 'STYLE'].includes(e.tagName)) {
      const colour = parse(e.tagName === 'text' ? style.fill : style.color).rgb;
      const ratio = contrast(colour, behind(e));
      if (ratio < 4.5) tell(`contrast ${ratio.toFixed(2)} of text <${e.tagName} class="${e.getAttribute('class')}">`);
    }
    if (['path', 'rect', 'polyline'].includes(e.tagName) && !e.classList.contains('axis')) {
      const colour = e.classList.contains('fill') || e.classList.contains('part') ? style.fill : style.stroke;
      // A part of a bar is told from its neighbour by its edge and order, so only text and marks must stand out.
      const least = e.classList.contains('part') ? 1.25 : 3;
      const ratio = contrast(parse(colour).rgb, behind(e));
      if (ratio < least) tell(`contrast ${ratio.toFixed(2)} of <${e.tagName} class="${e.getAttribute('class')}">`);
    }
    if (e.tagName === 'text') {
      const scale = e.ownerSVGElement.getBoundingClientRect().width / e.ownerSVGElement.viewBox.baseVal.width;
      const pixels = parseFloat(style.fontSize) * scale;
      if (pixels < 9) tell(`text of ${pixels.toFixed(1)} pixels in a chart`);
      const box = e.getBoundingClientRect(), chart = e.ownerSVGElement.getBoundingClientRect();
      if (box.left < chart.left - 1 || box.right > chart.right + 1) tell(`"${e.textContent}" leaves its chart`);
    }
  }
  for (const table of document.querySelectorAll('table')) {
    const scroll = table.closest('.scroll');
    if (!scroll || scroll.tabIndex !== 0 || !scroll.getAttribute('aria-label')) tell('a table without a box that scrolls');
  }
  const result = document.createElement('pre');
  result.id = 'probe';
  result.textContent = JSON.stringify(found);
  document.body.append(result);
})();
"""


# What is replaced by what, and a word of the problem that must be found.
DAMAGES = [
    ('<h2 id="models-h">', '<div style="width:2000px">x</div><h2 id="models-h">', "wide on"),
    ('<p class="lead">', '<p class="lead" style="color:#888">', "contrast"),
    ("</main>", "<script>console.error(1)</script></main>", "CONSOLE"),
    ("</main>", '<a href="https://example.org/">x</a></main>', "refers to"),
    ("</main>", "", "not well-formed"),
    ('role="region" tabindex="0"', 'role="region"', "a table without"),
    ("font: 12px system-ui", "font: 7px system-ui", "pixels in a chart"),
]


def browser():
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


def run(chromium, profile, options, url):
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
               "--disable-background-networking", "--enable-logging=stderr", "--v=0", f"--user-data-dir={profile}"]
    return subprocess.run(command + options + [url], capture_output=True, text=True, timeout=180)


def console(stderr):
    return [line for line in stderr.splitlines() if "CONSOLE" in line]


def theme_options(theme):
    return [f"--blink-settings=preferredColorScheme={THEMES[theme]}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--screenshots", type=Path, help="folder for a picture of each theme and width")
    parser.add_argument("--need-chromium", action="store_true", help="fail if there is no Chromium")
    parser.add_argument("--self-test", action="store_true", help="damage the page and see that it is noticed")
    arguments = parser.parse_args()

    chromium = browser()
    if chromium is None:
        print("SKIPPED: no Chromium is installed, so the page is not opened in a browser")
        if arguments.need_chromium:
            return 1
    text = arguments.page.read_text(encoding="utf-8")
    if arguments.self_test:
        return self_test(chromium, text)
    problems = check(chromium, text, arguments.screenshots)
    for problem in problems:
        print(f"FAIL {problem}")
    if not problems:
        print("ok: the page is well-formed" + (", quiet, fits its screens and can be read" if chromium else ""))
    return int(bool(problems))


def self_test(chromium, text):
    missed = 0
    for old, new, word in DAMAGES:
        if old not in text:
            sys.exit(f"the page has no `{old}` to damage")
        # Without a browser only the file itself is looked at.
        if chromium is None and word not in ("refers to", "not well-formed"):
            continue
        problems = check(chromium, text.replace(old, new, 1), None)
        found = any(word in problem for problem in problems)
        print(f"{'noticed' if found else 'MISSED '}  {word}: `{old}` -> `{new}`")
        missed += not found
    return int(missed > 0)


def check(chromium, text, screenshots):
    """Every problem of the page."""
    try:
        ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        return [f"the page is not well-formed: {error}"]
    without_style = re.sub(r"<style>.*?</style>", "", text, flags=re.S)
    resources = re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:,)([^"']*)""", without_style)
    problems = [f"the page refers to {resource}" for resource in resources]
    if chromium is None:
        return problems
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        profile = folder / "profile"
        page = folder / "page.html"
        page.write_text(text, encoding="utf-8")
        shots = screenshots or folder
        shots.mkdir(parents=True, exist_ok=True)
        for theme in THEMES:
            for width in WIDTHS:
                # The page itself, with its own policy: nothing may be said about it.
                shot = shots / f"{theme}-{width}.png"
                options = theme_options(theme) + [f"--window-size={width},2400", f"--screenshot={shot}"]
                shown = run(chromium, profile, options, page.as_uri())
                problems += [f"{theme} {width}: {line}" for line in console(shown.stderr)]
                if not shot.is_file():
                    problems.append(f"{theme} {width}: no screenshot: {shown.stderr[-500:]}")
                problems += probe(chromium, profile, folder, text, theme, width)
    return problems


def probe(chromium, profile, folder, text, theme, width):
    """What the probe finds in a copy of the page inside a frame of this width.

    A window of Chromium is never narrower than about 500 pixels; a frame can be.
    """
    policy = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*/>")
    script = PROBE.replace("WANTED", json.dumps(theme))
    copy = policy.sub("", text).replace("</body>", f"<script>{script}</script></body>")
    outer = folder / "outer.html"
    outer.write_text(f"<!DOCTYPE html><body style='margin:0'><iframe srcdoc=\"{html.escape(copy)}\" width={width} "
                     "height=2400 style='border:0'></iframe><pre id='out'></pre><script>onload = () => {"
                     "document.getElementById('out').textContent = document.querySelector('iframe')"
                     ".contentDocument.getElementById('probe').textContent }</script>", encoding="utf-8")
    options = theme_options(theme) + [f"--window-size={max(width, 600)},2400", "--dump-dom", "--virtual-time-budget=5000"]
    shown = run(chromium, profile, options, outer.as_uri())
    found = re.search(r"<pre id=\"out\">(.*?)</pre>", shown.stdout, re.S)
    if not found or not found.group(1):
        return [f"{theme} {width}: the probe said nothing: {shown.stderr[-500:]}"]
    return [f"{theme} {width}: {problem}" for problem in json.loads(html.unescape(found.group(1)))]


if __name__ == "__main__":
    sys.exit(main())
