"""The kinds of panels of the dashboards, each as a function. Every panel has a unit, and a tooltip that explains its
use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from grafana_foundation_sdk.builders import (
    common,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    text,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import prometheus as query_model
from grafana_foundation_sdk.models import text as text_model

SOURCE: Final = options.DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS: Final = 24
"""Width of Grafana's grid, in columns."""
CEILING: Final = "ceiling"
"""Prefix of the legends of series that are drawn as a dashed line: limits of the hardware, or of a rule."""

Needs = Literal["nvml", "node_exporter", "dcgm"]
Color = Literal["green", "yellow", "orange", "red", "blue", "text"]


@dataclass(frozen=True)
class Query:
    """One PromQL expression, and the legend of its series, a template such as `{{label}}` of Grafana."""

    expr: str
    legend: str


P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class PanelOptions:
    """Title, tooltip, unit and size of a panel.

    why: text of the tooltip: the meaning of the figure, and the values that show a problem. unit: Grafana's name of the
    unit, such as s, Bps, bytes or percentunit. width, height: size in cells of Grafana's grid. requires: a program that
    the panel needs besides Tidegate to have data; the tooltip names it.
    """

    title: str
    why: str
    unit: str
    width: int = 8
    height: int = 8
    requires: Needs | None = None

    def on(self, panel: P) -> P:
        """Gives these options to `panel`, a panel builder of the Grafana SDK: its builders have no common class."""
        why = f"{self.why}\n\nrequires: {self.requires}" if self.requires else self.why
        made: Any = panel
        made.title(self.title).description(why).datasource(SOURCE).unit(self.unit).height(self.height).span(self.width)
        return panel


def lines(
    panel_options: PanelOptions,
    *queries: Query,
    stacked: bool = False,
    limits: Sequence[tuple[float, Color]] = (),
    maximum: float | None = None,
    minimum: float | None = 0,
    steps: bool = False,
) -> timeseries.Panel:
    """A panel with curves over time. stacked: as areas on top of each other. `limits` are drawn as lines, for
    thresholds of alerts and budgets. steps: values change in steps, without slopes."""
    panel = panel_options.on(timeseries.Panel()).targets([_target(q, i) for i, q in enumerate(queries)])
    panel.color_scheme(build.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
    panel.line_width(1).fill_opacity(60 if stacked else 8).show_points(options.VisibilityMode.NEVER)
    panel.legend(
        common.VizLegendOptions()
        .display_mode(options.LegendDisplayMode.LIST)
        .placement(options.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    panel.tooltip(common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI).sort(options.SortOrder.DESCENDING))
    if minimum is not None:
        panel.min(minimum)
    if maximum is not None:
        panel.max(maximum)
    if stacked:
        panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL).group("A"))
    if steps:
        panel.line_interpolation(options.LineInterpolation.STEP_AFTER)
    if limits:
        panel.thresholds(_thresholds([(None, "green"), *limits]))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(options.GraphThresholdsStyleMode.DASHED))
    return panel.override_by_regexp(
        f"/^{CEILING}/",
        [
            model.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}),
            model.DynamicConfigValue("custom.fillOpacity", 0),
            model.DynamicConfigValue("custom.lineWidth", 2),
            model.DynamicConfigValue("custom.stacking", {"mode": "none", "group": "A"}),
        ],
    )


def number(
    panel_options: PanelOptions,
    query: Query,
    *,
    limits: Sequence[tuple[float, Color]] = (),
    spark: bool = False,
    named: bool = False,
    decimals: int | None = None,
) -> stat.Panel:
    """A panel with one number, the latest value. It has the colour of the highest of the `limits` that it exceeds.
    spark: with a small curve of its history. named: with the name of the series beside it."""
    panel = panel_options.on(stat.Panel()).targets([_target(query, 0, instant=not spark)])
    panel.thresholds(_thresholds([(None, "green" if limits else "text"), *limits]))
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    panel.graph_mode(options.BigValueGraphMode.AREA if spark else options.BigValueGraphMode.NONE)
    panel.color_mode(options.BigValueColorMode.VALUE)
    panel.text_mode(options.BigValueTextMode.VALUE_AND_NAME if named else options.BigValueTextMode.VALUE)
    return panel if decimals is None else panel.decimals(decimals)


def heat(panel_options: PanelOptions, expr: str) -> heatmap.Panel:
    """A heat map panel: how often each duration occurred over time. `expr` is a rate of histogram buckets, summed by
    `le`."""
    query = prometheus.Dataquery().expr(expr).legend_format("{{le}}").ref_id("A")
    panel = panel_options.on(heatmap.Panel()).targets([query.format(query_model.PromQueryFormat.HEATMAP).range()])
    return panel.calculate(False).cell_gap(1).show_legend().y_axis(heatmap.YAxisConfig().unit(panel_options.unit))


def states(panel_options: PanelOptions, query: Query, colors: dict[str, tuple[str, Color]]) -> statetimeline.Panel:
    """A panel with a bar for each series, whose colour shows the state over time. colors: displayed name and colour of
    each value."""
    panel = panel_options.on(statetimeline.Panel()).targets([_target(query, 0)])
    panel.mappings([_value_names(colors)])
    return panel.show_value(options.VisibilityMode.NEVER).row_height(0.8).no_value("none in this time")


@dataclass(frozen=True)
class Column:
    """One column of a table: `query` gives one row for each value of the table's key."""

    title: str
    expr: str
    unit: str
    limits: Sequence[tuple[float, Color]] = ()


def rows(panel_options: PanelOptions, key: str, columns: Sequence[Column], *, link: str = "") -> table.Panel:
    """A table panel with one row for each value of the label `key`. link: address to which a click on the key leads."""
    panel = panel_options.on(table.Panel())
    panel.targets([
        prometheus.Dataquery()
        .expr(column.expr)
        .legend_format(f"{{{{{key}}}}}")
        .ref_id(_ref(i))
        .format(query_model.PromQueryFormat.TABLE)
        .instant()
        for i, column in enumerate(columns)
    ])  # fmt: skip
    panel.with_transformation(model.DataTransformerConfig("joinByField", options={"byField": key, "mode": "outer"}))
    hidden = {"Time": True, **{f"Time {i + 1}": True for i in range(len(columns))}}
    panel.with_transformation(
        model.DataTransformerConfig(
            "organize", options={"excludeByName": hidden, "indexByName": {}, "renameByName": {}}
        )
    )
    for i, column in enumerate(columns):
        properties = [
            model.DynamicConfigValue("displayName", column.title),
            model.DynamicConfigValue("unit", column.unit),
        ]
        if column.limits:
            steps = _thresholds([(None, "green"), *column.limits]).build().to_json()
            properties += [
                model.DynamicConfigValue("thresholds", steps),
                model.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
            ]
        panel.override_by_name(f"Value #{_ref(i)}", properties)
    if link:
        panel.override_by_name(key, [model.DynamicConfigValue("links", [{"title": "Look at this run", "url": link}])])
    return panel


def page(title: str, why: str, markdown: str, height: int) -> text.Panel:
    """A panel with text (Markdown) over the whole width. why: tooltip. height: in rows of Grafana's grid."""
    panel = text.Panel().title(title).description(why).height(height).span(COLUMNS)
    return panel.mode(text_model.TextMode.MARKDOWN).content(markdown)


def _target(query: Query, index: int, *, instant: bool = False) -> Builder[query_model.Dataquery]:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(_ref(index))
    return target.instant() if instant else target.range()


def _ref(index: int) -> str:
    return chr(ord("A") + index)


def _thresholds(steps: Sequence[tuple[float | None, Color]]) -> build.ThresholdsConfig:
    return (
        build.ThresholdsConfig()
        .mode(model.ThresholdsMode.ABSOLUTE)
        .steps([model.Threshold(value=value, color=color) for value, color in steps])
    )


def _value_names(colors: dict[str, tuple[str, Color]]) -> model.ValueMap:
    named = {
        value: model.ValueMappingResult(text=text, color=color, index=i)
        for i, (value, (text, color)) in enumerate(colors.items())
    }
    return model.ValueMap(options=named)
