"""Writes docs/replication.md, README.md here and the figures from the recorded results, which are all that it reads.

    python -m benchmarks.replication.report [--results=FILE] [--drift=FILE] [--out=FILE] [--record=FILE]

Numbers, verdicts and figures follow from `results.jsonl`, `norm_drift.jsonl` and the rules of `findings.py`; the text
that judges them is `conclusions.md`. Refuses a grid that is not whole.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import re
import statistics
import sys
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker
from scipy import stats

from benchmarks.replication import norm_drift, run
from benchmarks.replication.base import NUM_STEPS
from benchmarks.replication.findings import (
    AVERAGE,
    AVERAGED,
    AVERAGED_SEEDS,
    AVERAGED_STEPS,
    DRIFT,
    FINDINGS,
    MARGIN,
    RATES,
    Arm,
    Finding,
    runs,
)

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
SCHEDULES = {"fp32": "HLAT's schedule", "to_zero": "cosine to zero", "constant": "constant rate"}


class Effect(NamedTuple):
    """Paired differences in nats per token: mean and half of the 95 % t interval; infinite where a run diverged."""

    differences: list[float]

    @property
    def num_diverged(self) -> int:
        return sum(not math.isfinite(difference) for difference in self.differences)

    @property
    def mean(self) -> float:
        return statistics.mean(self.differences)

    @property
    def half(self) -> float:
        count = len(self.differences)
        return float(stats.t.ppf(0.975, count - 1)) * statistics.stdev(self.differences) / math.sqrt(count)

    def verdict(self, claim: str) -> str:
        """Returns the verdict by the rule of `findings.py`."""
        if set(self.differences) == {math.inf}:
            return "confirmed" if claim == "higher" else "refuted"
        if self.num_diverged:
            return "no verdict"
        low, high = self.mean - self.half, self.mean + self.half
        if claim == "equal":
            confirmed, refuted = low >= -MARGIN and high <= MARGIN, low > MARGIN or high < -MARGIN
        else:
            confirmed, refuted = (low > 0, high < 0) if claim == "higher" else (high < 0, low > 0)
        return "confirmed" if confirmed else "refuted" if refuted else "not visible at this size"

    def __str__(self) -> str:
        if self.num_diverged:
            return f"diverged in {self.num_diverged} of {len(self.differences)} pairs"
        return f"{self.mean:+.4f} ± {self.half:.4f}"


def final(row: dict) -> float:
    """Returns the last validation loss of a run; infinite for one that diverged."""
    return math.inf if "diverged" in row else row["eval_loss"][str(NUM_STEPS)]


def losses_of(arm: Arm, results: dict[str, dict], seeds: int) -> list[float]:
    return [final(results[f"{arm.name}-{seed}"]) for seed in range(seeds)]


def best_arm(settings: str, finding: Finding, results: dict[str, dict]) -> Arm:
    """Returns the arm of these settings at the rate with the lowest mean loss."""
    arms = [arm for arm in finding.arms if arm.settings == settings]
    return min(arms, key=lambda arm: statistics.mean(losses_of(arm, results, finding.seeds)))


def effect_of(finding: Finding, results: dict[str, dict]) -> Effect:
    pair = (best_arm(settings, finding, results) for settings in (finding.first, finding.second))
    first, second = (losses_of(arm, results, finding.seeds) for arm in pair)
    return Effect([one - other for one, other in zip(first, second, strict=True)])


def average_effect(arm: Arm, results: dict[str, dict]) -> Effect:
    """Returns the average's loss less that of the better one of its two checkpoints."""
    rows = [results[f"{arm.name}-{seed}"].get("average") for seed in range(AVERAGED_SEEDS)]
    return Effect([math.nan if row is None else row["average"] - lowest_of(row) for row in rows])


def lowest_of(row: dict[str, float]) -> float:
    """Returns the lower loss of the two checkpoints that are averaged."""
    return min(row[str(step)] for step in AVERAGED_STEPS)


def drift_effect(drift: dict[tuple[str, int], dict], arm: str) -> Effect:
    seeds = sorted(seed for name, seed in drift if name == arm and ("shared", seed) in drift)
    return Effect([drift[arm, seed]["eval_loss"] - drift["shared", seed]["eval_loss"] for seed in seeds])


def section(name: str, finding: Finding, effect: Effect, body: list[str]) -> list[str]:
    return [
        f"## {finding.title}: {effect.verdict(finding.claim)}",
        "",
        f"**HLAT.** {finding.paper}",
        "",
        f"**Expected before the first run.** {finding.expected}",
        "",
        *body,
        "",
        f"![{finding.title}](../../docs/images/replication-{name}.png)",
        "",
    ]


def arms_table(finding: Finding, results: dict[str, dict], effect: Effect) -> list[str]:
    """Returns the lines of a table of the arms, and the sentence with the effect."""
    lines = ["| arm | peak rate | loss, mean | loss of each seed | spikes a run | weights that the last update left |"]
    lines += ["|---|---|---|---|---|---|"]
    for arm in finding.arms:
        rows = [results[f"{arm.name}-{seed}"] for seed in range(finding.seeds)]
        whole = [row for row in rows if "diverged" not in row]
        losses = [final(row) for row in rows]
        spikes = f"{statistics.mean(row['spikes'] for row in whole):.1f}" if whole else "-"
        unchanged = f"{statistics.mean(row['unchanged'] for row in whole):.1%}" if whole else "-"
        seeds = ", ".join("diverged" if math.isinf(loss) else f"{loss:.4f}" for loss in losses)
        mean = statistics.mean(losses)
        shown = "-" if math.isinf(mean) else f"{mean:.4f}"
        lines += [f"| `{arm.settings}` | {RATES[arm.rate]:g} | {shown} | {seeds} | {spikes} | {unchanged} |"]
    first, second = (best_arm(settings, finding, results) for settings in (finding.first, finding.second))
    claim = "equal, within the margin" if finding.claim == "equal" else finding.claim
    rates = (
        f", each at its best rate ({RATES[first.rate]:g} and {RATES[second.rate]:g})" if len(finding.rates) > 1 else ""
    )
    text = f"`{first.settings}` less `{second.settings}`{rates}: **{effect}** nats per token; the claim is *{claim}*."
    return [*lines, "", text]


def draw_arms(finding: Finding, results: dict[str, dict], path: pathlib.Path) -> None:
    """Draws the loss of each seed by rate, or for one rate the difference of the training losses over the steps."""
    figure, axes = pyplot.subplots(figsize=(6, 3))
    if len(finding.rates) > 1:
        for settings, color in ((finding.first, "C0"), (finding.second, "C1")):
            arms = [arm for arm in finding.arms if arm.settings == settings]
            losses = [losses_of(arm, results, finding.seeds) for arm in arms]
            rates = [RATES[arm.rate] for arm in arms]
            axes.plot(rates, [statistics.mean(each) for each in losses], color=color, label=settings)
            for rate, each in zip(rates, losses, strict=True):
                axes.plot([rate] * len(each), each, "o", ms=4, color=color, alpha=0.6)
        axes.set(xscale="log", xlabel="peak learning rate", ylabel="validation loss")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.legend()
    else:
        first, second = (arm for arm in finding.arms)
        for seed in range(finding.seeds):
            pair = [results[f"{arm.name}-{seed}"].get("loss") for arm in (first, second)]
            if None not in pair:
                differences = [one - other for one, other in zip(*pair, strict=True)]
                axes.plot([20 * (at + 1) for at in range(len(differences))], differences, color="C0", alpha=0.6, lw=1)
        axes.axhspan(-MARGIN, MARGIN, color="gray", alpha=0.2, lw=0)
        axes.axhline(0, color="gray", lw=0.8)
        axes.set(xlabel="step", ylabel=f"{first.settings} − {second.settings}", title="Training loss, each seed")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def draw_average(results: dict[str, dict], path: pathlib.Path) -> None:
    figure, axes = pyplot.subplots(figsize=(6, 3))
    for at, arm in enumerate(AVERAGED):
        for seed in range(AVERAGED_SEEDS):
            row = results[f"{arm.name}-{seed}"].get("average")
            if row is None:
                continue
            lowest = lowest_of(row)
            for key, color in (("average", "C0"), *((str(step), "C1") for step in AVERAGED_STEPS)):
                label = (
                    None
                    if at or seed or key == str(AVERAGED_STEPS[0])
                    else {"C0": "average", "C1": "checkpoints"}[color]
                )
                axes.plot(at + 0.1 * (seed - 1), row[key] - lowest, "o", ms=5, color=color, label=label)
    axes.axhline(0, color="gray", lw=0.8)
    axes.set_xticks(range(len(AVERAGED)), [SCHEDULES[arm.settings] for arm in AVERAGED])
    axes.set(ylabel="loss less the better checkpoint's")
    axes.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def draw_drift(drift: dict[tuple[str, int], dict], path: pathlib.Path) -> None:
    figure, axes = pyplot.subplots(figsize=(6, 3))
    for (arm, seed), row in drift.items():
        steps = [50 * (at + 1) for at in range(len(row["spread"]))]
        color = {"own": "C0", "shared": "C1", "resync": "C2"}[arm]
        axes.plot(
            steps, row["spread"], color=color, lw=1, label=None if seed else f"{arm} bits" if arm != "resync" else arm
        )
        if arm == "own":
            axes.plot(steps, row["walk"], color="black", ls=":", lw=1, label=None if seed else "random walk")
    axes.set(xlabel="step", ylabel="spread of the copies")
    axes.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def draw_summary(effects: dict[str, tuple[str, str, Effect]], path: pathlib.Path) -> None:
    """Draws each effect with its interval; `effects` is name -> (title, claim, effect)."""
    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(effects) + 1), layout="constrained")
    colors = {"confirmed": "C2", "refuted": "C3", "not visible at this size": "gray"}
    for at, (_, claim, effect) in enumerate(effects.values()):
        if effect.num_diverged:
            axes.text(2 * MARGIN, -at, str(effect), va="center")
            continue
        color = colors[effect.verdict(claim)]
        axes.errorbar(effect.mean, -at, xerr=effect.half, fmt="o", color=color, capsize=3)
    axes.axvspan(-MARGIN, MARGIN, color="gray", alpha=0.2, lw=0)
    axes.axvline(0, color="gray", lw=0.8)
    axes.set_yticks(
        [-at for at in range(len(effects))], [f"{title} (claim: {claim})" for title, claim, _ in effects.values()]
    )
    axes.set_xscale("symlog", linthresh=2 * MARGIN, linscale=1.5)
    ticks = [-0.1, -0.04, -0.02, 0, 0.02, 0.04, 0.1, 0.4]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set(xlabel="effect, nats per token", xlim=(-0.15, 0.6))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=run.RESULTS)
    parser.add_argument("--drift", type=pathlib.Path, default=norm_drift.RESULTS)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "replication.md")
    parser.add_argument("--record", type=pathlib.Path, default=FOLDER / "README.md")
    values = parser.parse_args()
    try:
        results, drift = run.read_results(values.results), norm_drift.read_results(values.drift)
    except ValueError as error:
        parser.error(str(error))
    missing = [name for name in runs() if name not in results]
    missing += [f"{arm}-{seed}" for arm in norm_drift.ARMS for seed in range(3) if (arm, seed) not in drift]
    if missing:
        print(f"{len(missing)} runs are missing, make them with run.py and norm_drift.py: {', '.join(missing)}")
        return 1
    pyplot.style.use("hlat_jax.assets.plots")
    images = values.out.parent / "images"
    effects = {name: (finding.title, finding.claim, effect_of(finding, results)) for name, finding in FINDINGS.items()}
    effects["average"] = (AVERAGE.title, AVERAGE.claim, average_effect(AVERAGED[0], results))
    effects["drift"] = (DRIFT.title, DRIFT.claim, drift_effect(drift, "own"))
    draw_summary(effects, images / "replication.png")
    sections = []
    for name, finding in FINDINGS.items():
        effect = effects[name][2]
        sections += section(name, finding, effect, arms_table(finding, results, effect))
        draw_arms(finding, results, images / f"replication-{name}.png")
    sections += section("average", AVERAGE, effects["average"][2], average_lines(results))
    draw_average(results, images / "replication-average.png")
    sections += section("drift", DRIFT, effects["drift"][2], drift_lines(drift))
    draw_drift(drift, images / "replication-drift.png")
    diverged = [f"`{name}`: {row['diverged']}" for name, row in results.items() if "diverged" in row]
    hours = sum(row.get("cpu_s", 0) for row in (*results.values(), *drift.values())) / 3600
    head, tail, record = re.split(r"<!-- \w+ -->\n", (FOLDER / "conclusions.md").read_text())
    summary = ["| finding | claim | effect, nats per token | verdict |", "|---|---|---|---|"]
    summary += [
        f"| {title} | {claim} | {effect} | {effect.verdict(claim)} |" for title, claim, effect in effects.values()
    ]
    made = [
        f"{len(results)} runs of the grid and {len(drift)} of `norm_drift.py`, {hours:.1f} CPU hours. "
        f"Runs that diverged: {'; '.join(diverged) or 'none'}.",
        "",
    ]
    values.out.write_text("\n".join([head.rstrip(), "", *summary, "", *made, tail]))
    values.record.write_text("\n".join([record, *sections]))
    print("\n".join([*summary, *made]))
    return 0


def average_lines(results: dict[str, dict]) -> list[str]:
    lines = ["| schedule | average less the better checkpoint | seeds |", "|---|---|---|"]
    for arm in AVERAGED:
        effect = average_effect(arm, results)
        seeds = ", ".join(f"{difference:+.4f}" for difference in effect.differences)
        lines += [f"| {SCHEDULES[arm.settings]} | {effect} | {seeds} |"]
    steps = " and ".join(map(str, AVERAGED_STEPS))
    return [*lines, "", f"Checkpoints of steps {steps}, loss per token of the held-out documents."]


def drift_lines(drift: dict[tuple[str, int], dict]) -> list[str]:
    lines = ["| arm | loss of each seed | less `shared` | spread at the end | random walk | widest difference |"]
    lines += ["|---|---|---|---|---|---|"]
    for arm in norm_drift.ARMS:
        rows = [row for (name, _), row in sorted(drift.items()) if name == arm]
        losses = ", ".join(f"{row['eval_loss']:.4f}" for row in rows)
        last = [f"{statistics.mean(row[key][-1] for row in rows):.4f}" for key in ("spread", "walk", "widest")]
        effect = str(drift_effect(drift, arm))
        lines += [f"| `{arm}` | {losses} | " + " | ".join(["-"] * 4 if arm == "shared" else [effect, *last]) + " |"]
    text = (
        "The spread is the root mean square over all weights of the norms, which begin at 1; that of `resync`, before "
    )
    return [*lines, "", text + "the last time that one copy was given to all."]


if __name__ == "__main__":
    sys.exit(main())
