"""Terminal tables of a server's fine-tunings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from service.cli.finetune_texts import loss_text, value_texts
from service.cli.tables import id_digits, job_table, local_time, state_text, titled
from service.results.format import duration
from service.results.training.pictures import has_values, merge_columns, merge_rows, vectors_of

if TYPE_CHECKING:
    from service.schemas.api import AnalysisDocument, ExpertDocument, FinetuneDocument

__all__ = ["analysis_tables", "finetune_table", "finetunes_table"]


def finetunes_table(finetunes: Sequence[FinetuneDocument]) -> Table:
    """Terminal table of fine-tunings, one row for each in the given order.

    Ids are shortened to the first digits that tell all of them apart, at least 8.
    """
    table = titled("Fine-tunings")
    for name in ("fine-tuning", "name", "state"):
        table.add_column(name, overflow="fold")
    table.add_column("experts", justify="right")
    table.add_column("worked", justify="right")
    table.add_column("created", no_wrap=True)
    digits = id_digits([finetune["id"] for finetune in finetunes])
    for finetune in finetunes:
        trained = sum(expert["bytes"] is not None for expert in finetune["experts"].values())
        table.add_row(
            finetune["id"][:digits],
            Text(finetune["name"]),
            state_text(finetune["state"]),
            f"{trained}/{len(finetune['experts'])}",
            duration(finetune["wall_clock_s"]),
            local_time(finetune["created_at"]),
        )
    table.caption = "experts: trained / all"
    return table


def analysis_tables(document: AnalysisDocument) -> list[Table]:
    """Terminal tables of the analysis of a fine-tuning's experts, the models that it has trained.

    The first table has the distributions fitted to the experts' task vectors (differences between the weights of an
    expert and of its base). The second table has the losses of merges of the experts, if the analysis has such losses.
    """
    fits = titled("Task vectors")
    for name in ("expert", "optimizer", "distribution"):
        fits.add_column(name, no_wrap=True)
    for name in ("scale", "distance", "log-likelihood", "share of 0"):
        fits.add_column(name, justify="right")
    for fleet in document["fleets"]:
        for vector in vectors_of(fleet):
            for fit in vector["fits"]:
                numbers = (f"{number:.3f}" for number in (fit["distance"], fit["log_likelihood"], fit["zeros"]))
                fits.add_row(vector["expert"], fleet["name"], fit["distribution"], f"{fit['scale']:.2e}", *numbers)
    is_metric = has_values(document)
    merges = titled("Merges" if is_metric else "Mean loss of merges")
    merges.add_column("merge method", no_wrap=True)
    merges.add_column("experts", justify="right")
    for name, _ in merge_columns(document):
        merges.add_column(name, justify="right")
    for method, experts, cells in merge_rows(document):
        merges.add_row(method, str(experts), *cells)
    merges.caption = (
        ("metric, and loss in " if is_metric else "")
        + f"nats per token of the reference answers, mean over the merged experts' tasks ({document['samples']} "
        "samples each), at the best coefficient" + (", chosen on as many other samples" if is_metric else "")
    )
    return [fits, merges] if merges.row_count else [fits]


def finetune_table(finetune: FinetuneDocument, *, server: str) -> Table:
    """Terminal table of one fine-tuning's fields and experts (the models that it trains).

    `server` is the server's address, which is put before links.
    """
    rows = [("expert", f"{alias}: {_expert_text(expert)}") for alias, expert in finetune["experts"].items()]
    return job_table(finetune, noun="fine-tuning", server=server, rows=rows)


def _expert_text(expert: ExpertDocument) -> str:
    progress = expert["progress"]
    if progress is None:
        return f"{expert['method']}, not begun"
    of = f" of {progress['steps']}" if expert["bytes"] is None else ""
    values = "".join(f", {text}" for text in value_texts(progress))
    state = "trained, " if expert["bytes"] is not None else ""
    loss = loss_text(progress, is_moved=progress.get("loss_at") == "offset")
    return f"{expert['method']}, {state}update {progress['step']}{of}, {loss}{values}"
