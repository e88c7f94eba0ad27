# SPDX-License-Identifier: Apache-2.0
"""Look at the built documentation in a browser: screenshots, messages of the console, images that do not load.

    python tools/screenshots.py docs/_build/html reports/screenshots

Eight pages, each as on a desktop and on a phone, in light and in dark. The exit status is 1 if any page, also of those
without a picture, writes an error to the console, asks for a file that is not there or for anything outside the
folder, has a broken image, or is wider than the screen.

It needs the package playwright and Chromium, found as CHROMIUM, on the path, or where playwright installs it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["main"]

PAGES = (
    "index",
    "quickstart",
    "which_path",
    "generated/migration_names",
    "generated/ops/linear",
    "performance",
    "targets",
    "measured",
)
SCREENS: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1280, "height": 900}},
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "device_scale_factor": 2,
        "is_mobile": True,
        "has_touch": True,
    },
}
SCHEMES = ("light", "dark")

BROKEN_IMAGES = """
() => [...document.images].filter(i => i.complete && i.naturalWidth === 0).map(i => i.src)
"""
TOO_WIDE = "() => document.documentElement.scrollWidth - window.innerWidth"


def chromium() -> str | None:
    """Return the path of a browser, or None for the one that playwright has installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    return str(found) if found else None


def visit(context: Any, html: Path, page: str, picture: Path | None) -> Iterator[str]:
    """Open a page, save a picture of it if there is a path for it, and yield what is wrong with it."""
    problems: list[str] = []
    tab = context.new_page()
    tab.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("requestfailed", lambda request: problems.append(f"cannot load {request.url}"))
    root = html.as_uri()

    def allow(route: Any) -> None:
        inside = route.request.url.startswith((root, "data:"))
        if not inside:
            problems.append(f"asks for {route.request.url}")
        (route.continue_ if inside else route.abort)()

    tab.route("**/*", allow)
    tab.goto((html / f"{page}.html").as_uri(), wait_until="load")
    problems += [f"broken image {source}" for source in tab.evaluate(BROKEN_IMAGES)]
    wider = tab.evaluate(TOO_WIDE)
    if wider > 0:
        problems.append(f"{wider} pixels wider than the screen")
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        tab.screenshot(path=str(picture))
    tab.close()
    yield from problems


def main(arguments: list[str] | None = None) -> int:
    """Take the pictures; return the number of problems, at most 1."""
    from playwright.sync_api import sync_playwright  # type: ignore[import-not-found, unused-ignore]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("html", type=Path, help="folder of the built documentation")
    parser.add_argument("out", type=Path, help="folder for the pictures")
    options = parser.parse_args(arguments)
    html = options.html.resolve()
    every = [page.relative_to(html).with_suffix("").as_posix() for page in html.rglob("*.html")]
    failed = 0
    with sync_playwright() as playwright:
        # Containers often run as root, where the sandbox of the browser cannot.
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for screen, settings in SCREENS.items():
            for scheme in SCHEMES:
                context = browser.new_context(color_scheme=scheme, **settings)
                # Colors move nothing: the pages without a picture are opened in one scheme.
                others = sorted({*every} - {*PAGES}) if scheme == SCHEMES[0] else []
                for page in (*PAGES, *others):
                    name = f"{page.replace('/', '-')}-{screen}-{scheme}.png"
                    picture = options.out / name if page in PAGES else None
                    for problem in visit(context, html, page, picture):
                        failed = 1
                        print(f"{page}, {screen}, {scheme}: {problem}", file=sys.stderr)
                context.close()
        browser.close()
    count = len(PAGES) * len(SCREENS) * len(SCHEMES)
    print(f"{len(every)} pages, {count} pictures in {options.out}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
