"""The live view of `prefixcache top`. The only module that knows textual.

It draws with the terminal's own colours, or with none.
"""

from __future__ import annotations

from dataclasses import replace

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.events import Resize
from textual.widgets import Static

from prefixcache.cli.top_view import ORDERS, Screen, render
from prefixcache.cli.top_watch import Watch

_ALL_ORDERS = tuple(ORDERS)


class TopApp(App[None]):
    """watch: has looked once, with `first` as the outcome. with_colours: False for none."""

    CSS = "Screen { background: ansi_default; color: ansi_default; } #view { width: 100%; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [  # noqa: RUF012 - textual's own way
        Binding("q,ctrl+c", "quit", "quit", priority=True),
        Binding("s", "sort", "sort"),
        Binding("p", "pause", "pause"),
    ]

    def __init__(self, watch: Watch, first: Screen, interval_s: float, with_colours: bool) -> None:
        super().__init__(ansi_color=True)
        self._watch = watch
        self._shown = first
        self._interval_s = interval_s
        self._with_colours = with_colours
        self._order = first.seen.order
        self._is_paused = False
        self._is_looking = False
        self._view = Static(id="view", markup=False)

    def compose(self) -> ComposeResult:
        yield self._view

    def on_mount(self) -> None:
        self._draw()
        self.set_interval(self._interval_s, self._tick)

    def on_resize(self, event: Resize) -> None:
        self._draw()

    def on_unmount(self) -> None:
        self._watch.close()

    def action_sort(self) -> None:
        self._order = _ALL_ORDERS[(_ALL_ORDERS.index(self._order) + 1) % len(_ALL_ORDERS)]
        self._look()

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        if self._is_paused:
            self._draw()
        else:
            self._look()

    @property
    def text(self) -> Text:
        """What is shown."""
        screen = replace(self._shown, is_paused=self._is_paused)
        lines = render(screen, self.size.width, self.size.height)
        return Text("\n", no_wrap=True).join(lines)

    def _draw(self) -> None:
        text = self.text
        self._view.update(text if self._with_colours else text.plain)

    def _tick(self) -> None:
        if self._is_paused:
            return
        if self._is_looking:
            # The daemon takes its time: only that is shown meanwhile.
            self._shown = self._watch.now()
            self._draw()
        else:
            self._look()

    def _look(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self.run_worker(self._look_in_thread, thread=True)

    def _look_in_thread(self) -> None:
        num_sequences = min(max(1, self.size.height), 1000)
        screen = self._watch.look(self._order, num_sequences)
        self.call_from_thread(self._show, screen)

    def _show(self, screen: Screen) -> None:
        self._is_looking = False
        self._shown = screen
        self._draw()
        if screen.seen.order is not self._order and not screen.problem:
            self._look()  # the key was pressed while it looked
