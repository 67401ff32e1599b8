"""The page on the dashboard. Needs bokeh; `ImportError` without it."""

from __future__ import annotations

import time
from typing import Any, Final

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, DataTable, FactorRange, HoverTool, NumberFormatter, TableColumn
from bokeh.plotting import figure
from bokeh.transform import factor_cmap
from distributed import Scheduler
from distributed.dashboard import scheduler as dashboard
from distributed.dashboard.components import add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from fastcheck_dask.monitoring.dashboard_data import (
    NODE_COLUMNS,
    SAVE_COLUMNS,
    SHARD_COLUMNS,
    Told,
    node_columns,
    save_columns,
    shard_columns,
)

#: Where the page is; the second one puts it into the menu of plots, and into JupyterLab.
PATHS: Final = ("/fastcheck", "/individual-fastcheck")
_UPDATE_MILLISECONDS: Final = 1000
_HEALTH_COLOURS: Final = {"well": "#54a24b", "behind": "#eeca3b", "damaged": "#e45756", "silent": "#9d9d9d"}


def install() -> None:
    """Add the page to every dashboard that this process makes from now on. Idempotent."""
    for path in PATHS:
        dashboard.applications[path] = fastcheck_page


def told_by(scheduler: Scheduler) -> dict[str, Told]:
    """Return what the scheduler knows of the storage nodes, by name; other workers are left out."""
    return {
        str(worker.name): Told(worker.metrics["fastcheck"], worker.last_seen)
        for worker in scheduler.workers.values()
        if worker.metrics.get("fastcheck")
    }


def fastcheck_page(scheduler: Scheduler, extra: dict[str, Any], document: Any) -> None:
    """Fill a document; Dask calls this for each visitor."""
    document.title = "Dask: FastCheck"
    page = Page(scheduler)
    page.update()
    add_periodic_callback(document, page, _UPDATE_MILLISECONDS)  # type: ignore[no-untyped-call]
    document.add_root(page.root)
    document.template = env.get_template("simple.html")
    document.template_variables.update(extra)
    document.theme = BOKEH_THEME


class Page:
    """Nodes with their memory and health, the shards, and the last saves."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.nodes, self.shards, self.saves = (
            ColumnDataSource({name: [] for name in names}, name=title)
            for title, names in (
                ("fastcheck_nodes", NODE_COLUMNS),
                ("fastcheck_shards", SHARD_COLUMNS),
                ("fastcheck_saves", SAVE_COLUMNS),
            )
        )
        self._names = FactorRange()
        wide = {"sizing_mode": "stretch_width"}
        self.root = column(
            self._memory(wide),
            self._table(
                self.nodes,
                ("name", "rack", "health", "master", "used_mib", "reserved_mib", "limit_mib"),
                wide,
            ),
            self._table(self.shards, SHARD_COLUMNS, wide),
            self._timeline(wide),
            **wide,
        )

    def update(self) -> None:
        """Draw what is so now."""
        told, now = told_by(self._scheduler), time.time()
        if self._names.factors != sorted(told):
            self._names.factors = sorted(told)
        self.nodes.data = node_columns(told, now)
        self.shards.data = shard_columns(told)
        self.saves.data = save_columns(told, now)

    def _memory(self, wide: dict[str, Any]) -> Any:
        drawn = figure(
            title="Storage nodes: memory used, and reserved by saves; coloured by health",
            x_range=(0, 1.02),
            y_range=self._names,
            height=220,
            tools="",
            **wide,
        )
        colours = factor_cmap("health", list(_HEALTH_COLOURS.values()), list(_HEALTH_COLOURS))
        drawn.hbar(y="name", right="reserved", height=0.8, color="#d0d0d0", source=self.nodes)
        drawn.hbar(y="name", right="used", height=0.6, color=colours, source=self.nodes)
        shown = [(name, f"@{name}") for name in ("name", "rack", "health", "master", "merges", "damaged")]
        drawn.add_tools(HoverTool(tooltips=[*shown, ("MiB", "@used_mib{0.0} of @limit_mib{0.0}")]))
        return drawn

    def _timeline(self, wide: dict[str, Any]) -> Any:
        drawn = figure(
            title="The last saves, as they were committed on each node",
            x_axis_label="seconds from now",
            y_range=self._names,
            height=220,
            tools="xpan,xwheel_zoom,reset",
            **wide,
        )
        drawn.scatter(x="seconds", y="node", size=9, alpha=0.7, source=self.saves)
        shown = [("run", "@run"), ("generation", "@generation"), ("MiB", "@mib{0.0}")]
        drawn.add_tools(HoverTool(tooltips=shown))
        return drawn

    def _table(self, source: ColumnDataSource, names: tuple[str, ...], wide: dict[str, Any]) -> Any:
        number = NumberFormatter(format="0.0")
        columns = [
            TableColumn(field=name, title=name, **({"formatter": number} if name.endswith("mib") else {}))
            for name in names
        ]
        return DataTable(source=source, columns=columns, height=180, index_position=None, **wide)
