"""The server's documents as notebooks show them: dicts and lists with an HTML display, and tables as data frames.

A view holds all data that it shows, so displaying a view sends no request. Texts of users (names, labels, reasons,
prompts) are escaped by the template.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.errors import Conflict
from service.jobs.registry import KINDS
from service.results.format import duration, sample_count, sort_holdout, violation_text

if TYPE_CHECKING:
    import jinja2
    import pandas

    from service.schemas.api import JobDocument
    from service.schemas.files import TrialDocument

__all__ = ["Front", "Job", "JobList", "Summary", "Trial", "TrialList", "TrialSamples", "overview"]

# Rows of a table, and characters of a text in it, that are shown; the document has all of them.
MAX_ROWS, MAX_TEXT = 60, 400

# Names of jobs in the one-line text of a list.
MAX_NAMES = 5

# Contrast of at least 3 with white and with black; the words beside the dots have the notebook's colour.
COLOURS = {
    "COMPLETE": "#2f9e5f",
    "RUNNING": "#3b82d6",
    "FAILED": "#d9483b",
    "FAIL": "#d9483b",
    "PAUSED": "#b7791f",
    "STOPPED": "#b7791f",
}


@dataclass(frozen=True)
class Table:
    """Table in the display that a notebook shows for a document.

    `cells` has the table's rows; each row has a value for each of `columns`. The columns named in `texts` are aligned
    to the left, and their long texts are wrapped.
    """

    columns: Sequence[str]
    cells: Sequence[Sequence[object]]
    texts: frozenset[str] = frozenset()
    caption: str = ""

    @property
    def shown_columns(self) -> list[str]:
        """Columns to show: those with at least one cell that is not empty, or all columns if the table has no rows."""
        used = [any(row[index] not in (None, "") for row in self.cells) for index in range(len(self.columns))]
        return [name for name, is_used in zip(self.columns, used, strict=True) if is_used or not self.cells]

    @property
    def rows(self) -> list[list[tuple[str, str]]]:
        """The rows to show: each is a list of pairs of column name and cell text.

        Columns that are empty in all rows are left out.
        """
        shown = set(self.shown_columns)
        return [
            [(name, _text(cell)) for name, cell in zip(self.columns, row, strict=True) if name in shown]
            for row in self.cells
        ]


@dataclass(frozen=True)
class Display:
    """Content of the display that a notebook shows for a document.

    `share` is the share of planned work that is done, from 0 to 1, which is shown as a bar; None shows no bar.
    """

    title: str
    state: str = ""
    facts: Sequence[tuple[str, str]] = ()
    share: float | None = None
    share_text: str = ""
    tables: Sequence[Table] = field(default_factory=tuple)


def overview(url: str, jobs: Mapping[str, JobList], *, error: str = "") -> str:
    """HTML display of a client: the server's address, and a table of each list in `jobs`, with its key as title.

    If `error` is not empty, it is shown as the reason why the jobs are missing.
    """
    tables = [replace(found.table(), caption=title) for title, found in jobs.items() if found]
    return _render(Display(f"mergesearch server {url}", facts=[("jobs", error)] if error else [], tables=tables))


def _render(display: Display) -> str:
    return _template().render(view=display, colours=COLOURS)


@cache
def _template() -> jinja2.Template:
    import jinja2

    file = Path(__file__).with_name("views.html.j2")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(file.read_text(encoding="utf-8"))


class _Document(dict[str, Any], ABC):
    """Document of the server, as a dict that notebooks show as HTML; `dict(document)` has the plain representation."""

    def _repr_html_(self) -> str:
        return _render(self._display())

    @abstractmethod
    def _display(self) -> Display:
        """Content that a notebook shows for this document."""


class Job(_Document):
    """JSON document of a job (a study, a fine-tuning or a served study), as a dict that a notebook shows as HTML."""

    def __repr__(self) -> str:
        states = self._trials() or self._stage()
        return _line(f"<{self._noun()} {self['name']} ({self['id']}): {self['state']}{states and f', {states}'}>")

    def _noun(self) -> str:
        kind = KINDS.get(self.get("kind", ""))
        return "study" if kind is None else kind.noun

    def _trials(self) -> str:
        counts = ", ".join(f"{count} {state}" for state, count in self.get("trials", {}).items())
        return counts and f"trials: {counts}"

    def _stage(self) -> str:
        experts = self.get("experts", {})
        return ", ".join(
            f"{alias} {expert['progress']['step']}/{expert['progress']['steps']}" if expert["progress"] else alias
            for alias, expert in experts.items()
        )

    def _display(self) -> Display:
        progress = self.get("progress") or {}
        planned, scored = progress.get("samples_planned"), progress.get("samples_scored")
        steps_planned, steps = progress.get("steps_planned"), progress.get("steps", 0)
        queue = self.get("queue")
        best = progress.get("best_trial")
        facts = {
            "id": self["id"],
            "reason": self["reason"],
            "waits for": self["waiting_for"],
            "queue": queue and f"place {queue['position']} of {queue['length']}",
            "description": self["description"],
            "tags": ", ".join(self["tags"]),
            "notes": self["notes"],
            "searcher": self.get("algorithm"),
            "stage": progress.get("stage"),
            "trials": self._trials().removeprefix("trials: "),
            "steps": steps_planned and f"{steps:,} of {steps_planned:,}",
            "samples": planned and f"{scored:,} of {planned:,} scored",
            "best so far": None if best is None else f"trial {best}: {_values_text(progress['best'])}",
            "time": f"created {_minute(self['created_at'])}, {duration(self['wall_clock_s'])} of work",
            "owner": " of team ".join(filter(None, (self["owner"], self["team"]))),
        }
        tables = []
        if experts := self.get("experts"):
            cells = [(alias, expert["method"], *_training(expert["progress"])) for alias, expert in experts.items()]
            tables.append(
                Table(("expert", "method", "updates", "loss", "values"), cells, frozenset({"expert", "values"}))
            )
        share = min(1.0, scored / planned) if planned and self["state"] == "RUNNING" else None
        return Display(
            f"{self._noun().capitalize()} {self['name']}",
            state=self["state"],
            facts=[(name, str(text)) for name, text in facts.items() if text],
            share=share,
            share_text="" if share is None else f"{share:.0%} of the planned samples",
            tables=tables,
        )


class JobList(list["JobDocument"]):
    """List of jobs, which a notebook shows as a table."""

    def __repr__(self) -> str:
        named = [f"{job['name']} {job['state']}" for job in self[:MAX_NAMES]]
        rest = [f"{len(self) - MAX_NAMES} more"] if len(self) > MAX_NAMES else []
        return _line(f"<{_counted(len(self), 'job')}: {', '.join([*named, *rest])}>")

    def _repr_html_(self) -> str:
        return _render(Display(_counted(len(self), "job"), tables=[self.table()] if self else []))

    def table(self) -> Table:
        """Table with a row for each job; if there are many jobs, only for the last ones in the list."""
        shown = self[-MAX_ROWS:]
        cells = [
            (job["name"], job["state"], _states(job), _minute(job["created_at"]), job["owner"], job["id"])
            for job in shown
        ]
        columns = ("name", "state", "trials", "created", "owner", "id")
        caption = f"the last {len(shown)} of {len(self)} jobs" if len(shown) < len(self) else ""
        return Table(columns, cells, frozenset(columns), caption)


class Trial(_Document):
    """JSON document of a trial, as a dict that a notebook shows as HTML."""

    def __repr__(self) -> str:
        values = self["values"] or (self["rungs"][-1]["values"] if self["rungs"] else {})
        return _line(
            f"<trial {self['number']} ({self['label']}): {self['state']}{values and f', {_values_text(values)}'}>"
        )

    def _display(self) -> Display:
        facts = {
            "label": self["label"],
            "origin": self["origin"],
            "reason": self["reason"],
            "invalid": self.get("invalid"),
            "violates": violation_text(self["violations"]).removeprefix("violates "),
            "samples": f"{self['samples_scored']:,} scored, {self['samples_reused']:,} reused",
            "recipe": self["recipe_digest"],
        }
        tables = []
        if self["rungs"]:
            names = list(dict.fromkeys(name for rung in self["rungs"] for name in rung["values"]))
            cells = [
                (
                    rung["rung"],
                    sample_count(rung["samples"]),
                    *(_value_text(rung["values"].get(name), rung["standard_errors"].get(name)) for name in names),
                )
                for rung in self["rungs"]
            ]
            tables.append(Table(("rung", "samples", *names), cells, caption="± is one standard error, on search data"))
        if self["configuration"]:
            cells = [(name, _number(value)) for name, value in [*self["configuration"].items()][:MAX_ROWS]]
            left = len(self["configuration"]) - len(cells)
            caption = f"{left} more parameters" if left else ""
            tables.append(Table(("parameter", "value"), cells, frozenset({"parameter"}), caption))
        return Display(
            f"Trial {self['number']}",
            state=self["state"],
            facts=[(name, str(text)) for name, text in facts.items() if text],
            tables=tables,
        )


class TrialList(list["TrialDocument"]):
    """List of trials, which a notebook shows as a table."""

    def __repr__(self) -> str:
        counts = Counter(trial["state"] for trial in self)
        return f"<{_counted(len(self), 'trial')}: {', '.join(f'{count} {state}' for state, count in counts.items())}>"

    def _repr_html_(self) -> str:
        shown = self[:MAX_ROWS]
        names = list(dict.fromkeys(name for trial in shown for rung in trial["rungs"] for name in rung["values"]))
        cells = []
        for trial in shown:
            rung = trial["rungs"][-1] if trial["rungs"] else None
            values = [rung and _value_text(rung["values"].get(n), rung["standard_errors"].get(n)) for n in names]
            samples = rung and sample_count(rung["samples"])
            reason = trial.get("invalid") or trial["reason"]
            cells.append((trial["number"], trial["label"], trial["state"], samples, *values, reason))
        caption = "values at the highest rung that each trial has finished; ± is one standard error"
        if len(shown) < len(self):
            caption += f"; the first {len(shown)} of {len(self)} trials"
        columns = ("trial", "label", "state", "samples", *names, "reason")
        table = Table(columns, cells, frozenset({"label", "state", "reason"}), caption)
        return _render(Display(_counted(len(self), "trial"), tables=[table] if self else []))

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the trials as a data frame: a row for each trial, with the columns of the method `trial_columns`.

        Raises:
            Conflict: pandas is not installed.
        """
        rows = []
        for trial in self:
            rung = trial["rungs"][-1] if trial["rungs"] else None
            row: dict[str, Any] = {name: trial.get(name) for name in TRIAL_COLUMNS}
            row["rung"] = rung and rung["rung"]
            row["samples"] = rung and sum(rung["samples"].values())
            row |= {name: trial.get(name) for name in ("samples_scored", "samples_reused")}
            if rung:
                row |= _estimates(rung)
            row |= {f"parameter.{name}": value for name, value in (trial["configuration"] or {}).items()}
            rows.append(row)
        names = dict.fromkeys(name for row in rows for name in row)
        groups = ("value.", "standard_error.", "parameter.")
        # As in `trial_columns`: an objective's value and error are neighbours, and parameters are last.
        order = sorted(names, key=lambda name: (name.startswith("parameter."), name.startswith(groups)))
        return _frame(rows, order)


# Columns of a data frame of trials that are keys of a trial's document, before those of the highest rung.
TRIAL_COLUMNS = ("number", "state", "origin", "label", "bracket", "reason", "invalid", "recipe_digest")


class Front(_Document):
    """Pareto front of a study, the content of `pareto.json`."""

    def __repr__(self) -> str:
        names = ", ".join(objective["name"] for objective in self["objectives"])
        count = _counted(len(self["front"]), "trial")
        return _line(f"<front of {count} in {names}: hypervolume {self['hypervolume']:.4g}>")

    def _display(self) -> Display:
        objectives = self["objectives"]
        arrows = {each["name"]: "↑" if each["direction"] == "maximize" else "↓" for each in objectives}
        cells = [
            (
                row["trial"],
                row["label"],
                *(_value_text(row["values"].get(name), row["standard_errors"].get(name)) for name in arrows),
                violation_text(row.get("violations", {})),
            )
            for row in self["front"][:MAX_ROWS]
        ]
        caption = f"hypervolume {self['hypervolume']:.4g}; ± is one standard error, on search data"
        if len(cells) < len(self["front"]):
            caption += f"; the first {len(cells)} of {len(self['front'])} trials"
        columns = ("trial", "label", *(f"{name} {arrow}" for name, arrow in arrows.items()), "constraints")
        table = Table(columns, cells, frozenset({"label", "constraints"}), caption)
        chosen = self.get("preferred")
        facts = [("preferred", f"trial {chosen['trial']}: {_values_text(chosen['values'])}")] if chosen else []
        return Display("Pareto front", facts=facts, tables=[table])

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the Pareto front as a data frame, with a row for each trial.

        Its columns include `value.NAME` and `standard_error.NAME` for each objective.
        """
        names = [objective["name"] for objective in self["objectives"]]
        plain = ("trial", "label", "origin", "recipe_digest")
        rows = [{**{key: row[key] for key in plain}, **_estimates(row)} for row in self["front"]]
        estimates = [f"{group}.{name}" for name in names for group in ("value", "standard_error")]
        return _frame(rows, [*plain, *estimates])


class Summary(_Document):
    """Summary of a study's results and cost, the content of `summary.json`."""

    def __repr__(self) -> str:
        return _line(f"<summary of {self['study']}: {self['state']}, {self['finding']['text']}>")

    def _display(self) -> Display:
        best = self["best"]
        samples, check = self["samples"], self["verification"]
        facts = {
            "finding": self["finding"]["text"],
            "reason": self["reason"],
            "best": best and f"trial {best['trial']} ({best['label']}): {_values_text(best['values'])} on search data",
            "trials": ", ".join(f"{count} {state}" for state, count in self["trials"].items()),
            "samples": f"{samples['scored']:,} scored; every recipe in full would take {samples['full_budget']:,}",
            "time": duration(self["wall_clock_s"]),
            "verification": check["status"],
            "failures": "\n".join(f"trial {each['trial']}: {each['reason']}" for each in self["failures"][:MAX_NAMES]),
        }
        tables = []
        if self["holdout"]:
            rows = sort_holdout(self["holdout"])[:MAX_ROWS]
            names = list(dict.fromkeys(name for row in rows for name in row["values"]))
            cells = [
                (
                    row["trial"],
                    row["label"],
                    *(_interval_text(row["values"].get(name)) for name in names),
                    _interval_text(row["mean"]),
                )
                for row in rows
            ]
            columns = ("trial", "label", *names, "mean over objectives")
            tables.append(Table(columns, cells, frozenset({"label"}), "held-out data, with 95 % intervals"))
        return Display(
            f"Results of {self['study']}",
            state=self["state"],
            facts=[(name, str(text)) for name, text in facts.items() if text],
            tables=tables,
        )


class TrialSamples(_Document):
    """JSON document with one page of the samples of a trial, or of two trials side by side."""

    def __repr__(self) -> str:
        against = "" if self["against"] is None else f" against trial {self['against']}"
        shown = _counted(len(self["samples"]), "sample")
        return _line(f"<{shown} of {self['total']} of {self['objective']}, trial {self['trial']}{against}>")

    def _display(self) -> Display:
        sides = {"a": self["trial"], **({} if self["against"] is None else {"b": self["against"]})}
        cells = []
        for sample in self["samples"][:MAX_ROWS]:
            row = [sample["position"], sample["prompt"], sample["reference"]]
            for side in sides:
                found = sample[side] or {"value": None, "response": None}
                row += [found["response"], _number(found["value"])]
            cells.append(row)
        names = [name for number in sides.values() for name in (f"trial {number}", f"value of {number}")]
        columns = ("position", "prompt", "reference", *names)
        texts = frozenset({"prompt", "reference", *(f"trial {number}" for number in sides.values())})
        difference = self["difference"]
        facts = {
            "objective": self["objective"],
            "split": self["split"],
            "difference": difference and _interval_text(difference),
            "texts": "; ".join(self["missing"]),
        }
        caption = f"{len(cells)} of {_counted(self['total'], 'sample')}"
        return Display(
            f"Samples of trial {self['trial']}",
            facts=[(name, str(text)) for name, text in facts.items() if text],
            tables=[Table(columns, cells, texts, caption)],
        )

    def to_dataframe(self) -> pandas.DataFrame:
        """Return these samples as a data frame, with a row for each sample.

        The first columns describe the sample, such as `prompt`. The columns `a.value`, `a.response` and
        `a.is_truncated` have the trial's result. If the samples are of two trials, the columns `b.value`, `b.response`
        and `b.is_truncated` have the second trial's result.

        Raises:
            Conflict: pandas is not installed.
        """
        sides = ("a",) if self["against"] is None else ("a", "b")
        plain, parts = ("position", "document", "prompt", "reference"), ("value", "response", "is_truncated")
        rows = [
            {
                **{key: sample[key] for key in plain},
                **{f"{side}.{part}": (sample[side] or {}).get(part) for side in sides for part in parts},
            }
            for sample in self["samples"]
        ]
        return _frame(rows, [*plain, *(f"{side}.{part}" for side in sides for part in parts)])


def _frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pandas.DataFrame:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise Conflict(
            f"to_dataframe: the Python package {error.name} is not installed here; install it: pip install pandas"
        ) from error
    return pandas.DataFrame([[row.get(name) for name in columns] for row in rows], columns=columns)


def _estimates(found: Mapping[str, Any]) -> dict[str, Any]:
    estimates: dict[str, Any] = {}
    for name, value in found["values"].items():
        estimates |= {f"value.{name}": value, f"standard_error.{name}": found["standard_errors"].get(name)}
    return estimates


def _training(progress: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if progress is None:
        return "", "", ""
    loss = f"{progress['loss']:.4g}"
    if progress.get("loss_at") == "offset":
        loss += " at the offset"
        if (at_weights := progress.get("weights_loss")) is not None:
            loss += f", {at_weights:.4g} at the weights"
    values = _values_text(progress["values"])
    if linearized := progress.get("linearized_values"):
        values += f"; linearized: {_values_text(linearized)}"
    return f"{progress['step']}/{progress['steps']}", loss, values


def _states(job: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {state}" for state, count in job.get("trials", {}).items())


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _values_text(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def _value_text(value: float | None, error: float | None) -> str:
    return _number(value) if value is None or error is None else f"{value:.4g} ± {error:.2g}"


def _interval_text(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return ""
    low, high = estimate["ci95"]
    return f"{estimate['value']:.4g} [{low:.4g}, {high:.4g}]"


def _minute(time: str) -> str:
    return f"{time[:16].replace('T', ' ')} UTC"


def _text(cell: object) -> str:
    return "" if cell is None else _shortened(str(cell))


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def _line(text: str) -> str:
    return _shortened(" ".join(text.split()))
