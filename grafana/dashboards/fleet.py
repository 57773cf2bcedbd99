"""The dashboard "Fleet": state of all runs, to find the runs that have a problem."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tidegate.grafana.dashboards.frame import FIRING, frame, live_view, section, variable, window
from tidegate.grafana.dashboards.panels import Column, PanelOptions, Query, lines, number, rows, states

_STEP = (
    'max by (run) (sum by (run, rank, host) (rate(tidegate_phase_seconds_sum{run=~"$run"}[$window])) '
    '/ (sum by (run, rank, host) (rate(tidegate_steps_total{run=~"$run"}[$window])) > 0))'
)
_ALL = 'sum by (run) (rate(tidegate_phase_seconds_sum{run=~"$run"}[$window]))'
_UPDATE = 'sum by (run) (rate(tidegate_phase_seconds_sum{run=~"$run",phase="update"}[$window]))'
_STALL = 'sum by (run) (rate(tidegate_stall_seconds_total{run=~"$run",phase="update"}[$window]))'
_TOKENS = 'sum by (run) (rate(tidegate_tokens_total{run=~"$run"}[$window]))'
_AGE = 'max by (run) (time() - tidegate_step_timestamp_seconds{run=~"$run"})'
_BEHIND = (
    'max by (run) (tidegate_desired_generation{run=~"$run"}) - on (run) min by (run) (tidegate_generation{run=~"$run"})'
)
_FIRING = f"sum by (run) ({FIRING})"


def dashboard() -> Dashboard:
    made = frame("fleet", "Tidegate / Fleet", "Are the runs well, and if not, which one.", one_run=False)
    live_view(window(made.with_variable(variable("run", 'tidegate_agents{state=~".+"}'))))
    for add in (_now, _runs, _control):
        add(made)
    return made


def _now(made: Dashboard) -> None:
    section(
        made,
        "Now",
        number(
            PanelOptions(title="Ranks live", unit="short", width=4, height=4,
                 why="Ranks that the daemon has heard of within their lease."),
            Query('sum(tidegate_agents{run=~"$run",state="live"})', "live"),
        ),
        number(
            PanelOptions(title="Ranks lost or stale", unit="short", width=4, height=4,
                 why="Ranks that fell silent without a goodbye: the process died, its host is gone, or the network is "
                 "cut. The others wait for it in their next collective. Runbook: TidegateAgentLost."),
            Query('sum(tidegate_agents{run=~"$run",state=~"lost|stale"})', "lost or stale"),
            limits=((1, "red"),),
        ),
        number(
            PanelOptions(title="Alerts firing", unit="short", width=4, height=4,
                 why="Alerts of these runs; each names its runbook. Routing and silences are Alertmanager's."),
            Query(f"count({FIRING}) or vector(0)", "firing"),
            limits=((1, "orange"),),
        ),
        number(
            PanelOptions(title="Oldest last step", unit="s", width=4, height=4,
                 why="How long ago the rank that is furthest behind ended a step. Compare it with the seconds a step "
                 "below; a run that is finished is not counted once its ranks are gone. Runbook: TidegateStepOverdue."),
            Query('max(time() - tidegate_step_timestamp_seconds{run=~"$run"})', "age"),
            limits=((300, "orange"), (900, "red")), decimals=0,
        ),
        number(
            PanelOptions(title="Scrapes that fail", unit="short", width=4, height=4,
                 why="Ranks and daemons that the discovery lists and that do not answer Prometheus: a firewall, or an "
                 "address that other machines cannot reach."),
            Query('count(up{job=~"tidegate-.*"} == 0) or vector(0)', "down"),
            limits=((1, "red"),),
        ),
        number(
            PanelOptions(title="Tokens a second", unit="short", width=4, height=4,
                 why="All runs together: what is paid for."),
            Query(f"sum({_TOKENS})", "tokens"), spark=True,
        ),
    )  # fmt: skip


def _runs(made: Dashboard) -> None:
    section(
        made,
        "Runs",
        rows(         PanelOptions(title="Every run", unit="short", width=24, height=8,
                 why="The worst rank of each run counts. Click a run to see what it waits for."),
            "run",
            (
                Column("Ranks live", 'sum by (run) (tidegate_agents{run=~"$run",state="live"})', "short"),
                Column("Lost or stale", 'sum by (run) (tidegate_agents{run=~"$run",state=~"lost|stale"})', "short",
                       ((1, "red"),)),
                Column("Last step", _AGE, "s", ((300, "orange"), (900, "red"))),
                Column("Seconds a step", _STEP, "s"),
                Column("Update's share", f"{_UPDATE} / ({_ALL} > 0)", "percentunit"),
                Column("Update stalled", f"{_STALL} / ({_UPDATE} > 0)", "percentunit", ((0.3, "orange"), (0.6, "red"))),
                Column("Tokens a second", _TOKENS, "short"),
                Column("Generations behind", _BEHIND, "short", ((1, "orange"),)),
                Column("Alerts", f'{_FIRING} or 0 * sum by (run) (tidegate_agents{{run=~"$run",state=~".+"}})', "short",
                       ((1, "orange"),)),
            ),
            link="/d/tidegate-run?var-run=${__value.text}&var-datasource=${datasource}",
        ),
        lines(
            PanelOptions(title="Seconds a step", unit="s", width=8,
                 why="Wall time from step to step, of the slowest rank. A jump that has no blue mark (knobs turned) is "
                 "the machine's or the data's."),
            Query(_STEP, "{{run}}"),
        ),
        lines(
            PanelOptions(title="Update's share of the step", unit="percentunit", width=8,
                 why="What offloading costs: the less, the better the update hides behind nothing. Above a half, look "
                 "at the run's stalls first."),
            Query(f"{_UPDATE} / ({_ALL} > 0)", "{{run}}"), maximum=1,
        ),
        lines(
            PanelOptions(title="Share of the update that is stalled", unit="percentunit", width=8,
                 why="Wall time of the update in which no parameter was being updated. The line is the limit of the "
                 "alert TidegateUpdateStalled for one cause."),
            Query(f"{_STALL} / ({_UPDATE} > 0)", "{{run}}"), limits=((0.3, "orange"),), maximum=1,
        ),
        lines(
            PanelOptions(title="Tokens a second", unit="short", width=8, why="What each run makes of its machines."),
            Query(_TOKENS, "{{run}}"),
        ),
        lines(
            PanelOptions(title="Slowest rank against the median", unit="none", width=8,
                 why="Update time of the slowest rank, by that of the median rank. Ranks wait for each other, so one "
                 "at 1.5 costs all of them half of an update."),
            Query(
                'max by (run) (sum by (run, rank, host) '
                '(rate(tidegate_phase_seconds_sum{run=~"$run",phase="update"}[$window]))) '
                '/ (quantile by (run) (0.5, sum by (run, rank, host) '
                '(rate(tidegate_phase_seconds_sum{run=~"$run",phase="update"}[$window]))) > 0)',
                "{{run}}",
            ), limits=((1.5, "orange"),),
        ),
        states(
            PanelOptions(title="Alerts over time", unit="short", width=8,
                 why="Which alerts fired when. The dashboard Runbooks says what to do about each."),
            Query(f"max by (run, alertname) ({FIRING})", "{{run}}: {{alertname}}"),
            {"1": ("firing", "red")},
        ),
    )  # fmt: skip


def _control(made: Dashboard) -> None:
    section(
        made,
        "Control plane",
        lines(
            PanelOptions(title="Requests to the daemon", unit="reqps", width=8,
                 why="By status class. 4xx are refused tokens and stale edits; any 5xx is a fault of the daemon or its "
                 "database."),
            Query("sum by (status) (rate(tidegate_requests_total[$__rate_interval]))", "{{status}}"), stacked=True,
        ),
        lines(
            PanelOptions(title="Time to answer", unit="s", width=8,
                 why="99 % of the daemon's answers took less, by route; long polls (directive, events) are meant to "
                 "wait. Training never waits for it."),
            Query(
                "histogram_quantile(0.99, sum by (le, route) "
                "(rate(tidegate_request_seconds_bucket{route!~\".*(directive|events).*\"}[$__rate_interval])))",
                "{{route}}",
            ),
        ),
        lines(
            PanelOptions(title="Generations behind", unit="short", width=8,
                 why="Knobs that were agreed and that the slowest rank does not run with yet: more than a step or two "
                 "of it is TidegateGenerationNotAcknowledged."),
            Query(_BEHIND, "{{run}}"), steps=True, limits=((1, "orange"),),
        ),
    )  # fmt: skip
