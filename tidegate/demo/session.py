"""One run of the demo: starts the services, trains, prints the summary, stops the services. Ctrl-C ends it cleanly at
any time."""

from __future__ import annotations

import os
import signal
import sys
import time
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import tidegate
from tidegate.agent.control.attachment import Attachment
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.demo import DemoOptions
from tidegate.demo.devices import DemoDevices, choose_devices
from tidegate.demo.services import start_daemon, start_view
from tidegate.demo.summary import Summary
from tidegate.demo.text import batch, read_text

WINDOW = 128
BATCH = 8
HIDDEN = 256
LAYERS = 4
LEARNING_RATE = 1.5e-3
BETAS = (0.9, 0.95)
RATES = {"h2d_bytes_per_second": 5.0e8, "d2h_bytes_per_second": 5.0e8, "update_params_per_second": 2.0e8}
"""Rates of the emulated device: slow enough that the update takes a visible share of a step."""

OWN_PATHS = ("nvme", "pfs")
INTERRUPTED = 130


class Session:
    """One run of the demo. Call `run()` once."""

    def __init__(self, options: DemoOptions) -> None:
        self.options = options
        self.console = Console(soft_wrap=True)
        self.interactive = sys.stdout.isatty() and sys.stdin.isatty()
        self.headless = not self.interactive if options.headless is None else options.headless
        self.name = options.run or time.strftime("demo-%Y%m%d-%H%M%S")
        self.folder = Path("runs") / self.name
        self._interrupted = False

    @cached_property
    def devices(self) -> DemoDevices:
        return choose_devices(self.options.emulated)

    def run(self) -> int:
        """Runs the demo, and returns the exit status; INTERRUPTED after a Ctrl-C."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)
        with ExitStack() as stack:
            stack.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
            sys.unraisablehook = partial(self._unraisable, sys.unraisablehook)
            try:
                return self._run(stack)
            except KeyboardInterrupt:
                self.console.print("\nInterrupted: stopping daemon and live view.")
                return INTERRUPTED
            finally:
                # Another Ctrl-C must not interrupt the clean-up.
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def _unraisable(self, before: Callable[[Any], object], dropped: sys.UnraisableHookArgs) -> None:
        """The `sys.unraisablehook` during a run: Python calls it for an exception that it cannot raise, for example in
        a destructor. A KeyboardInterrupt after a Ctrl-C is ignored, because `_check_interrupted` raises it again later.
        All other exceptions go to `before`, the previous hook."""
        if not (self._interrupted and isinstance(dropped.exc_value, KeyboardInterrupt)):
            before(dropped)

    def _check_interrupted(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed. Without this call, a Ctrl-C would have no effect when Python
        receives it during a fork or while it destroys objects."""
        if self._interrupted:
            raise KeyboardInterrupt

    def _run(self, stack: ExitStack) -> int:
        text = read_text(self.options.text, WINDOW)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.console.print(f"[bold]Tidegate demo[/bold]  run [bold]{self.name}[/bold]")
        url = self.options.daemon or self._start_daemon(stack)
        self._check_interrupted()
        view = None
        if self.options.view:
            view, service = start_view(self.options.dashboard_port, url, self.folder / "live-view.log")
            stack.callback(service.stop)
        self._check_interrupted()
        optimizer, model = self._build(self._make_paths(stack))
        stack.callback(optimizer.close)
        attachment = self._attach(optimizer, model, url)
        self._announce(model, optimizer, attachment, url, view)
        summary = Summary(self.name, optimizer, attachment)
        self._train(model, optimizer, attachment, text, summary)
        summary.write(self.folder)
        summary.show(self.console, self.folder)
        attachment.close()
        if view is not None and not self.headless:
            self.console.print(f"\nThe live view stays up at {view} until Ctrl-C.")
            with suppress(KeyboardInterrupt):
                signal.pause()
        return 0

    def _start_daemon(self, stack: ExitStack) -> str:
        url, daemon = start_daemon(self.options.port, self.folder / "daemon.log")
        if daemon is not None:
            stack.callback(daemon.stop)
        return url

    def _attach(self, optimizer: Optimizer, model: torch.nn.Module, url: str) -> Attachment:
        return tidegate.attach(
            optimizer,
            model,
            run=self.name,
            daemon=url,
            reset_knobs=self.options.reset_knobs,
            metrics_bind=self.options.metrics_bind,
            metrics_port=self.options.metrics_port,
            advertise_host=self.options.advertise_host,
        )

    def _make_paths(self, stack: ExitStack) -> dict[str, Path | str]:
        """The storage paths: the user's, or two directories in the run's folder that are removed at its end. They
        represent a local disk and a shared file system."""
        if self.options.paths is not None:
            return dict(self.options.paths)
        paths = {name: self.folder / "storage" / name for name in OWN_PATHS}
        for directory in paths.values():
            directory.mkdir(parents=True, exist_ok=True)
        stack.callback(_remove_empty, [*paths.values(), self.folder / "storage"])
        return {**paths}

    def _build(self, paths: dict[str, Path | str]) -> tuple[Optimizer, torch.nn.Module]:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        model: torch.nn.Module = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256, hidden_size=HIDDEN, intermediate_size=688, num_hidden_layers=LAYERS,
                num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=WINDOW, use_cache=False,
            )
        )  # fmt: skip
        model.to(self.devices.device)
        optimizer = tidegate.AdamW(
            model.parameters(),
            lr=LEARNING_RATE,
            betas=BETAS,
            weight_decay=0.1,
            max_grad_norm=1.0,
            offload=tidegate.Offload(
                stride=self.options.stride,
                static_ratio=self.options.static_ratio,
                subgroup_numel=self.options.subgroup_numel,
                device=self.devices.offload,
                emulated=tidegate.EmulatedRates(**RATES),
                paths=paths,
                tier_split=self.options.tier_split,
                host_cache=self.options.host_cache,
                order=self.options.order,
            ),
        )
        return optimizer, model

    def _announce(
        self, model: torch.nn.Module, optimizer: Optimizer, attachment: Attachment, url: str, view: str | None
    ) -> None:
        params = sum(p.numel() for p in model.parameters())
        say = self.console.print
        subgroups = len(optimizer.engine.layouts)
        say(f"  model      Llama architecture, {params:,} parameters, byte-level, {subgroups} subgroups")
        if optimizer.device.kind == "emulated":
            say("  device     [yellow]emulated[/yellow]: paced to stated rates, no performance claim is made from it")
            say(f"  no GPU     {self.devices.why_no_gpu}", markup=False)
        else:
            say(f"  device     {self.devices.name}")
        for name, path in optimizer.engine.store.paths.items() if optimizer.engine.store is not None else ():
            say(f"  storage    {name}: {path.settings.location}")
        if view is not None:
            self._announce_view(view)
        say(f"  REST docs  {url}/docs")
        say(f"  metrics    http://{attachment.metrics_address}/metrics")
        say("  try        tidegate status    tidegate knobs set stride=3 static_ratio=0.25 tier_split=nvme:2,pfs:1\n")

    def _announce_view(self, view: str) -> None:
        """Prints the address of the live view and the sign-in link; opens the link in a browser if there is a
        terminal."""
        from tidegate import dashboard

        self.console.print(f"  live view  {view}")
        link = dashboard.link_to(view)
        if link is None:
            self.console.print(f"  no link    {dashboard.no_link()}", markup=False)
            return
        self.console.print(f"  open by    {link} (once, within 10 minutes)", markup=False)
        if not self.headless and dashboard.wants_browser():
            webbrowser.open(dashboard.page_to_open(link, view))

    def _train(
        self, model: torch.nn.Module, optimizer: Optimizer, attachment: Attachment, text: torch.Tensor, summary: Summary
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, LEARNING_RATE, total_steps=self.options.steps + 1, pct_start=0.1, cycle_momentum=False
        )
        optimizer.observers.append(summary.record_plan)
        deadline = time.monotonic() + self.options.seconds if self.options.seconds else float("inf")
        with self._progress() as progress:
            task = progress.add_task("training", total=self.options.steps, loss="", knobs="")
            for step in range(self.options.steps):
                tokens = batch(text, BATCH, WINDOW, generator).to(self.devices.device)
                optimizer.zero_grad()
                output = model(input_ids=tokens, labels=tokens).loss
                output.backward()
                loss = output.item()
                optimizer.log(loss=loss, tokens=tokens.numel())
                optimizer.step()
                scheduler.step()
                summary.record_step(loss, tokens.numel())
                self._show_progress(progress, task, step + 1, loss, optimizer, attachment)
                if time.monotonic() > deadline:
                    break

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[knobs]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.interactive,
        )

    def _show_progress(
        self, progress: Progress, task: Any, step: int, loss: float, optimizer: Optimizer, attachment: Attachment
    ) -> None:
        """Updates the progress bar on a terminal; otherwise prints a line after every tenth of the steps."""
        self._check_interrupted()
        effective = optimizer.effective_knobs()
        knobs = (
            f"stride {effective['stride']} static {effective['static_ratio']} split {effective['tier_split']} "
            f"generation {attachment.generation}"
        )
        progress.update(task, completed=step, loss=f"loss {loss:.3f}", knobs=knobs)
        if not self.interactive and (step == 1 or step % max(1, self.options.steps // 10) == 0):
            self.console.print(f"  step {step}/{self.options.steps}  loss {loss:.3f}  {knobs}")
            sys.stdout.flush()


def _remove_empty(directories: list[Path]) -> None:
    """Removes the directories that are empty; directories with other files stay."""
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()
