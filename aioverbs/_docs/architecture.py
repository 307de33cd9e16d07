"""Draw the picture of the README.

python aioverbs/_docs/architecture.py > aioverbs/_docs/_static/architecture.svg
"""

from collections.abc import Iterator

__all__ = ["draw"]

_WIDTH, _ROW, _GAP = 760, 46, 10
# Rows from top to bottom; each box has a share of the width, a colour and a text.
_ROWS = (
    (((1, "#dbe9f6"), "Your service: handlers, clients, tests"),),
    (((3, "#cfe3d4"), "serve, listen"), ((3, "#cfe3d4"), "WorkerPool"), ((4, "#cfe3d4"), "connect: messages, grants")),
    (((6, "#f6ecd2"), "queue pairs and their queues: await qp.write(...)"), ((4, "#f6ecd2"), "memory regions")),
    (((6, "#f6dcd2"), "ResourceDomain: owned by one event loop, no locks"), ((4, "#f6dcd2"), "ProtectionDomain")),
    (((1, "#e6e0f0"), "struct verbs_context: the public verbs ABI, one path in machine code"),),
    (((5, "#e8e8e8"), "libibverbs and a NIC"), ((5, "#e8e8e8"), "soft0: the software device")),
)  # fmt: skip


def _boxes() -> Iterator[str]:
    for number, row in enumerate(_ROWS):
        left, top = float(_GAP), _GAP + number * (_ROW + _GAP)
        whole = sum(share for (share, _), _ in row)
        room = _WIDTH - _GAP * (len(row) + 1)
        for (share, colour), text in row:
            width = room * share / whole
            yield f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{_ROW}" rx="6" fill="{colour}"/>'
            yield f'<text x="{left + width / 2:.0f}" y="{top + _ROW / 2 + 5:.0f}">{text}</text>'
            left += width + _GAP


def draw() -> str:
    """Return the drawing as SVG, on a white background so that it is visible on dark pages."""
    height = _GAP + len(_ROWS) * (_ROW + _GAP)
    style = 'font-family="sans-serif" font-size="15" fill="#222" text-anchor="middle"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" {style}>'
    title = "<title>The layers of aioverbs, from a service down to a NIC or the software device</title>"
    return "\n".join((head, title, f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>', *_boxes(), "</svg>\n"))


if __name__ == "__main__":
    print(draw(), end="")
