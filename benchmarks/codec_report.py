"""Tables and plots of the codec benchmark, on the terminal and as a page."""

from __future__ import annotations

import platform
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import codec_plots, machine
from benchmarks.checkpoints import Checkpoints
from benchmarks.codec_cases import Kind
from benchmarks.codec_goals import Goal
from benchmarks.codec_measures import Measure, Measures, Scaling, Spread

_GIGA = 1e9
_FIGURES = ("ratio", "encode", "decode")
_OURS = ("delta", "index", "as saved")
_INTRODUCTION = """\
# Codecs against others, on checkpoints of real training

Written by `make bench-codecs`; the program is `benchmarks/codecs.py`.

{machine}

How it is measured: samples of 16 MiB, 1 MiB parts evenly spread over the state. All coders run in turn in
one process with one thread; a figure is the median of {rounds} rounds of its CPU time (of 2 for pcodec and
zlib). GB/s are 10^9 raw bytes per second. Quote ratios of one run: absolute rates move with what else the
machine does. A residual (XOR or difference) is computed within the timed part, for others as for ours. Our
checksums are on, except in the row that says so; Blosc2, pcodec and ZipNN have none. Ours writes into memory
that is there already, as a save does. Unless the line above says *plain malloc* (`--plain-malloc`), malloc
keeps what is freed, so that those who return fresh buffers do not pay for page faults either; otherwise they
are slower, by how much depends on what ran before. Each coder is fed with what gives it the best ratio: the
raw values, their XOR with those of the base, or the difference; the tables say which. *delta* is `XorDelta`,
*index* is `PrefixIndex`, *as saved* is what the encoder of a save does: it chooses between the two from a
sample, and its time has the digests too. Every round trip was compared bit for bit. Tuned cases are those
that the codecs may have been tuned on; the held-out ones count. The bound is the best order-0 code of byte
planes, of the values, the XOR or the difference. Means are geometric, ranges are over the cases.
"""


@dataclass(frozen=True)
class _Table:
    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [
            f"## {self.title}",
            "",
            "| " + " | ".join(self.columns) + " |",
            "|---" * len(self.columns) + "|",
        ]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"


def progress(measures: Measures) -> None:
    """Print one line about a case that was measured."""
    case = measures.case
    ours = "index" if case.kind is Kind.MOMENTUM else "delta"
    mine = measures.by_name[ours]
    parts = [f"{ours} {_short(mine)}"]
    for peer in ("ZipNN", "Blosc2 zstd-1 shuffle", "pcodec-8"):
        name, theirs = measures.best(peer)
        parts.append(f"{name} {_short(theirs)}")
    set_name = "tuned" if case.is_tuned else "held out"
    machine.console.print(
        f"{case.name} ({set_name}) bound {measures.bound:.3f}: {'; '.join(parts)}", soft_wrap=True
    )


def _short(measure: Measure) -> str:
    return f"{measure.ratio:.3f} {measure.encode / _GIGA:.2f}/{measure.decode / _GIGA:.2f}"


@dataclass(frozen=True)
class Report:
    """Everything that one run of the benchmark found."""

    machine: str
    runs: Sequence[Checkpoints]
    taken: Sequence[Measures]
    scaling: Scaling | None
    goals: Sequence[Goal]
    rounds: int

    def show(self) -> None:
        """Print all tables."""
        for table in self._tables():
            machine.table(table.title, table.columns, table.rows)

    def write(self, folder: Path, stem: str = "codecs") -> None:
        """Write the page and its plots; all their names start with `stem`."""
        folder.mkdir(parents=True, exist_ok=True)
        page = [_INTRODUCTION.format(machine=f"{_processor()}; {self.machine}.", rounds=self.rounds)]
        page += [table.markdown() for table in self._tables()]
        for figure in ("encode", "decode"):
            plot = codec_plots.draw(held_out(self.taken), figure, folder / f"{stem}_{figure}.png")
            page.append(f"![Ratio by {figure} rate, held-out cases]({plot.name})\n")
        (folder / f"{stem}.md").write_text("\n".join(page))

    def _tables(self) -> Iterator[_Table]:
        yield self._goals()
        if self.scaling is not None:
            yield _scaling_table(self.scaling)
        for kind in Kind:
            for is_tuned in (False, True):
                group = [m for m in self.taken if m.case.kind is kind and m.case.is_tuned is is_tuned]
                if group:
                    yield _class_table(kind, group, is_tuned=is_tuned)
        yield _case_table(self.taken)
        yield self._losses()

    def _goals(self) -> _Table:
        rows = [
            [
                goal.kind,
                f"{goal.against}: {goal.figure}",
                f"{goal.wanted:.3f}",
                str(goal.got),
                "reached" if goal.reached else "NOT REACHED",
                str(goal.cases),
            ]
            for goal in self.goals
        ]
        title = "Goals, held-out cases: ours by theirs, in one run"
        return _Table(title, ("state", "against", "at least", "got", "", "cases"), rows)

    def _losses(self) -> _Table:
        rows = []
        for run in self.runs:
            report = run.report
            losses = report["losses"]
            means = [statistics.mean(losses[at : at + 20]) for at in (0, 50, 100, 200, len(losses) - 20)]
            row = [run.name, f"{report['parameters'] / 1e6:.1f} M", report["recipe"]["optimizer"]]
            rows.append([*row, *(f"{loss:.2f}" for loss in (*means, report["uniform"]))])
        columns = ("run", "parameters", "optimizer", "1", "51", "101", "201", "281", "uniform guess")
        return _Table("Loss, means of 20 steps from", columns, rows)


def held_out(taken: Sequence[Measures]) -> list[Measures]:
    """Leave out the cases that the codecs may have been tuned on."""
    return [measures for measures in taken if not measures.case.is_tuned]


def by_coder(group: Sequence[Measures]) -> Iterator[tuple[str, str, list[Measure]]]:
    """Give each coder with one measure per case: ours by name, peers with the feed that suited them best.

    Yields
    ------
    name, feeds, measures : str, str, list of Measure
        A peer with a feed that was measured in every case comes once more with that feed alone.
    """
    names = dict.fromkeys(name for measures in group for name in measures.by_name)
    for name in names:
        if " / " not in name:
            yield name, "", [m.by_name[name] for m in group]
    for peer in dict.fromkeys(name.split(" / ")[0] for name in names if " / " in name):
        best = [m.best(peer) for m in group]
        feeds = Counter(name.split(" / ")[1] for name, _ in best)
        says = ", ".join(feed if len(feeds) == 1 else f"{feed} {n}x" for feed, n in feeds.most_common())
        yield peer, says, [measure for _, measure in best]
        always = next(iter(feeds)) if len(feeds) == 1 else ""
        for name in names:
            if name.startswith(f"{peer} / ") and all(name in m.by_name for m in group):
                feed = name.split(" / ")[1]
                if feed != always:
                    yield peer, f"always {feed}", [m.by_name[name] for m in group]


def _class_table(kind: Kind, group: Sequence[Measures], *, is_tuned: bool) -> _Table:
    rows = [["order-0 bound", "", str(Spread.of([m.bound for m in group])), "", ""]]
    found = [
        (
            name,
            feeds,
            [Spread.of([getattr(m, figure) for m in measures]) for figure in Measure.__annotations__],
        )
        for name, feeds, measures in by_coder(group)
    ]
    for name, feeds, (ratio, encode, decode) in sorted(found, key=lambda row: -row[2][0].mean):
        ours = name.startswith(_OURS)
        shown = f"fastcheck {name}" if ours else name
        rates = [f"{rate.mean / _GIGA:.2f}" for rate in (encode, decode)]
        rows.append([shown, feeds, str(ratio), *rates])
    set_name = "tuned" if is_tuned else "held out"
    title = f"{kind.value}, {set_name} ({len(group)} cases)"
    return _Table(title, ("coder", "fed with", "ratio", "encode GB/s", "decode GB/s"), rows)


def _scaling_table(scaling: Scaling) -> _Table:
    figures = [f"{rate / _GIGA:.2f}" for rate in (scaling.one, scaling.two)]
    row = [scaling.case.name, *figures, str(scaling.gain), f"{scaling.cpu_gain:.2f}"]
    columns = ("case", "one GB/s", "two GB/s", "gain, wall time", "gain by CPU time, were both cores free")
    return _Table("Two encoder processes on shared memory against one", columns, [row])


def _case_table(taken: Sequence[Measures]) -> _Table:
    peers = ("ZipNN", "Blosc2 zstd-1 shuffle", "pcodec-8")
    rows = []
    for measures in taken:
        ours = [measures.by_name[name].ratio for name in ("delta", "index")]
        theirs = [measures.best(peer)[1].ratio for peer in peers]
        set_name = "tuned" if measures.case.is_tuned else "held out"
        figures = [measures.bound, *ours, *theirs]
        rows.append([measures.case.name, set_name, *(f"{figure:.3f}" for figure in figures)])
    return _Table("Ratios, case by case", ("case", "", "bound", "delta", "index", *peers), rows)


def _processor() -> str:
    """Name the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
