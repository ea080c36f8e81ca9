"""``make golden``: write the golden files anew. A difference to the committed ones is a change of the wire format."""

from __future__ import annotations

from tests.golden import files


def main() -> None:
    """Write one file for each spec and remove those of no spec."""
    wanted = {files.path(spec): files.text(spec) for spec in files.SPECS}
    for old in set(files.FOLDER.glob("*.json")) - set(wanted):
        old.unlink()
        print(f"golden: removed {old.name}")
    changed = 0
    for path, text in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"golden: wrote {path.name}")
            changed += 1
    print(f"golden: {len(wanted)} files, {changed} changed")


if __name__ == "__main__":
    main()
