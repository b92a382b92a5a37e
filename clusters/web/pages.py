"""The HTML of the pages: frames that scripts fill with text from the JSON twins.

Rules
- Inserted text is escaped. Scripts and styles are separate files.
- Addresses are relative, so that the pages work below any prefix.
"""

from __future__ import annotations

from html import escape

PAGES = {
    "now": ("Now", "./"),
    "lineage": ("Lineage", "lineage"),
    "compare": ("Compare", "compare"),
    "version": ("Version", "version"),
    "changes": ("Changes", "changes"),
}
"""Page -> title and address."""
CHARTS = ("now", "version")
"""Pages that draw curves."""
_FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} - TensorVine</title>
<link rel="icon" href="static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="static/page.css">
{head}
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header>
<span class="name">TensorVine <b id="repository">{repository}</b></span>
<nav aria-label="Pages">{links}</nav>
<span id="state" role="status"></span>
</header>
<main id="main" tabindex="-1">{body}</main>
</body>
</html>
"""
_LOGIN = """<h1>Token</h1>
{wrong}
<p>The server printed an address with the token when it started. Open that address, or enter the token.</p>
<form method="post" action="login"><label>Token
<input type="password" name="token" autocomplete="current-password" required autofocus></label>
<button>Sign in</button></form>"""


def page(name: str, repository: str, changes: bool) -> str:
    """Return the HTML of a page.

    Args:
        name: one of `PAGES`.
        repository: name of the repository.
        changes: whether the page of changes is listed.
    """
    title, _ = PAGES[name]
    charts = (
        '<link rel="stylesheet" href="static/vendor/uplot.min.css">\n<script src="static/vendor/uplot.min.js"></script>'
    )
    head = charts if name in CHARTS else ""
    body = f'<h1>{title}</h1>\n<div id="page" aria-busy="true"><p class="dim">Loading ...</p></div>'
    body += "\n<noscript><p>The pages need JavaScript. Their facts are below /api, too.</p></noscript>"
    script = f'\n<script type="module" src="static/{name}.js"></script>'
    return _frame(title, head + script, body, repository, _links(name, changes))


def login(wrong: bool) -> str:
    """Return the HTML that asks for the token.

    >>> "This is not the token" in login(wrong=True)
    True
    """
    said = '<p role="alert" class="bad">This is not the token.</p>' if wrong else ""
    return _frame("Token", "", _LOGIN.format(wrong=said), "", "")


def _links(name: str, changes: bool) -> str:
    shown = [known for known in PAGES if known != "version" and (known != "changes" or changes)]
    return " ".join(
        f'<a href="{PAGES[known][1]}"{" aria-current=page" if known == name else ""}>{PAGES[known][0]}</a>'
        for known in shown
    )


def _frame(title: str, head: str, body: str, repository: str, links: str) -> str:
    return _FRAME.format(title=escape(title), head=head, body=body, repository=escape(repository), links=links)
