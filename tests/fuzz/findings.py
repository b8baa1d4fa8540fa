"""Findings grouped by signature: one file for each, with the smallest program seen, and a table of them all."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """One failing case, cut down."""

    kind: str
    """Kind of case: programs, states, options, files."""
    seed: int
    signature: str
    text: str
    script: str
    seconds: float = 0.0
    """Since the run began."""

    @property
    def name(self) -> str:
        words = re.sub(r"[^a-z0-9]+", "_", self.signature.lower()).strip("_")[:60]
        return f"{self.kind}_{words}_{hashlib.sha1(self.signature.encode()).hexdigest()[:6]}"

    @property
    def foreign(self) -> bool:
        """Whether it is no fault of this library's, or rounding that the oracle can explain."""
        return foreign(self.signature)


def foreign(kind: str) -> bool:
    """Whether a kind of failure is PyTorch's own, or rounding."""
    return kind.startswith(("PyTorch alone", "rounding"))


class Folder:
    """Where the findings of a run are kept; a run that goes on adds to what stands there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def add(self, finding: Finding) -> None:
        """Keep a finding; the shortest script of a signature is its file."""
        with (self.path / "findings.jsonl").open("a") as lines:
            lines.write(json.dumps(asdict(finding)) + "\n")
        target = self.path / f"{finding.name}.py"
        again = f"python -m tests.fuzz --show {finding.kind}:{finding.seed}"
        text = f'"""{finding.signature}\n\n{finding.text}\n\n{again}\n"""\n\n{finding.script}'
        if not target.exists() or len(target.read_text()) > len(text):
            target.write_text(text)

    def findings(self) -> list[Finding]:
        path = self.path / "findings.jsonl"
        return [Finding(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def table(self) -> str:
        """A row a signature: how often, the first seed, its file."""
        groups: dict[str, list[Finding]] = {}
        for each in self.findings():
            groups.setdefault(f"{each.kind}: {each.signature}", []).append(each)
        rows = sorted(groups.items(), key=lambda pair: (pair[1][0].foreign, -len(pair[1])))
        return "\n".join(
            f"{len(found):4}  {'(not ours) ' * found[0].foreign}{name}  seed {found[0].seed}  {found[0].name}.py" for name, found in rows
        )
