"""Common parts of all dashboards: variables, links to other dashboards and to the live view, and marks (annotations)
for changes of knobs and for alerts."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model

from tidegate.grafana.dashboards.panels import SOURCE

TAG: Final = "tidegate"
WINDOWS: Final = ("1m", "5m", "15m", "1h")
"""Values of the variable `window`."""
DEFAULT_WINDOW: Final = "5m"
"""Value of the variable `window` at first: the one of most alert rules."""
FIRING: Final = 'ALERTS{alertname=~"Tidegate.*",alertstate="firing",run=~"$run"}'
"""PromQL for Tidegate's alerts that fire. A Prometheus may hold alerts of other programs, also without a label run."""
ALL: Final = model.VariableOption(text="All", value="$__all", selected=True)
RANK: Final = 'run=~"$run",host=~"$host",rank=~"$rank"'
"""PromQL label matchers for the dashboard variables run, host and rank."""


def frame(uid: str, title: str, description: str, *, one_run: bool | None = True) -> build.Dashboard:
    """An empty dashboard with the links, the time range and the annotations that all dashboards have.

    It is read-only in Grafana; changes are made in this code. one_run: True if the variable `run` has a single value,
    to which the link to the live view then leads; False if it can have several; None for a dashboard without this
    variable and without annotations.
    """
    made = (
        build.Dashboard(title)
        .uid(f"tidegate-{uid}")
        .description(description)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(
            build.DashboardLink("Tidegate")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(False)
            .include_vars(True)
            .keep_time(True)
        )
        .link(
            build.DashboardLink("Live view")
            .type(model.DashboardLinkType.LINK)
            .icon("external link")
            .tooltip("What the run does now, step by step, and the knobs to turn.")
            .url("${live_view}/?run=${run}" if one_run else "${live_view}")
            .target_blank(True)
        )
    )
    if one_run is None:
        return made
    made.with_variable(build.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    return made.annotation(_generations()).annotation(_alerts())


def variable(name: str, metric: str, *, multi: bool = True) -> build.QueryVariable:
    """A dashboard variable `name`, whose values are those of the label `name` of the series that `metric` selects.

    multi: several values, or all, can be chosen.
    """
    made = (
        build.QueryVariable(name)
        .label(name.capitalize())
        .query(f"label_values({metric}, {name})")
        .datasource(SOURCE)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.NUMERICAL_ASC)
        .multi(multi)
    )
    return made.include_all(True).all_value(".*").current(ALL) if multi else made


def selectors(made: build.Dashboard, *, one_run: bool, path: bool = False) -> build.Dashboard:
    """Adds the variables run, host, rank, path (if `path` is True) and the address of the live view. Each variable only
    offers values that match the variables before it."""
    made.with_variable(variable("run", "tidegate_steps_total", multi=not one_run))
    made.with_variable(variable("host", 'tidegate_steps_total{run=~"$run"}'))
    made.with_variable(variable("rank", 'tidegate_steps_total{run=~"$run",host=~"$host"}'))
    if path:
        made.with_variable(variable("path", f"tidegate_path_free_bytes{{{RANK}}}"))
    return live_view(window(made))


def window(made: build.Dashboard) -> build.Dashboard:
    """Adds the variable `window`, the time over which rates are computed.

    Most counters of a rank only grow when a step ends. A window shorter than a step shows nothing, or zero.
    """
    choices = [model.VariableOption(text=text, value=text, selected=text == DEFAULT_WINDOW) for text in WINDOWS]
    return made.with_variable(
        build.IntervalVariable("window")
        .label("Rates over")
        .description("The time over which rates are computed. Choose two steps or more.")
        .values(",".join(WINDOWS))
        .options(choices)
        .current(choices[WINDOWS.index(DEFAULT_WINDOW)])
    )


def live_view(made: build.Dashboard) -> build.Dashboard:
    """Adds a text field for the address of the live view, to which links lead. The address is different at each
    site."""
    default = "http://127.0.0.1:8501"
    return made.with_variable(
        build.TextBoxVariable("live_view")
        .label("Live view at")
        .default_value(default)
        .current(model.VariableOption(text=default, value=default))
    )


def section(made: build.Dashboard, title: str, *panels: Builder[model.Panel]) -> None:
    """Adds a row with this title to the dashboard, and the panels below it."""
    made.with_row(build.Row(title))
    for panel in panels:
        made.with_panel(panel)


def _generations() -> build.AnnotationQuery:
    """The annotation that marks the times at which a new generation of knobs was committed, with its number."""
    generation = 'max by (run) (tidegate_desired_generation{run=~"$run"})'
    before = 'max by (run) (tidegate_desired_generation{run=~"$run"} offset $__interval)'
    return _annotation(
        "Knobs turned",
        f'count_values by (run) ("generation", {generation} > {before})',
        title="Generation {{generation}}",
        text="{{run}}: the desired knobs became generation {{generation}}.",
        tags="run,generation",
        color="blue",
    )


def _alerts() -> build.AnnotationQuery:
    return _annotation(
        "Alerts",
        f"max by (run, alertname, severity) ({FIRING})",
        title="{{alertname}}",
        text="{{run}}: {{alertname}} ({{severity}}).",
        tags="run,severity",
        color="red",
    )


def _annotation(name: str, expr: str, *, title: str, text: str, tags: str, color: str) -> build.AnnotationQuery:
    return (
        build.AnnotationQuery()
        .name(name)
        .datasource(SOURCE)
        .enable(True)
        .icon_color(color)
        .target(prometheus.Dataquery().expr(expr).ref_id("Anno"))
        .title_format(title)
        .text_format(text)
        .tag_keys(tags)
    )
