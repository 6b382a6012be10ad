"""The devices that trained, as reported in clients' replies."""

from collections.abc import Iterable, Mapping, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from socflower.engines import legacy_api
from socflower.errors import ConfigError
from socflower.strategies.forwarding_grid import ForwardingGrid
from socflower.wire.message_keys import METRICS, NUM_EXAMPLES, TRAINED_ON, DeviceReport, decode

UNKNOWN = "unknown"
"""The device of a client that does not report it, such as one that socflower did not make."""


class TrainedDevices(ForwardingGrid):
    """A grid that keeps the device of each SoC's latest training; SoCs that train alone are in order of node ids."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._device_of: dict[int, str] = {}
        # The arithmetic of the clients, as in `DeviceReport`.
        self.arithmetics: set[str] = set()

    def document(self) -> dict[str, list[int]]:
        """Return the SoCs that trained on each device, such as `{"cpu": [0, 1]}`."""
        return {
            device: [soc for soc in sorted(self._device_of) if self._device_of[soc] == device]
            for device in sorted(set(self._device_of.values()))
        }

    def restore(self, document: Mapping[str, Sequence[int]]) -> None:
        """Restore the result of `document()` from before an interruption."""
        self._device_of = {soc: device for device, socs in document.items() for soc in socs}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Exchange messages through the inner grid."""
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        self._read(replies)
        return replies

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Pull through the inner grid."""
        replies = list(self._grid.pull_messages(message_ids))
        self._read(replies)
        return replies

    def _read(self, replies: Sequence[Message]) -> None:
        trained = [reply for reply in replies if _has_trained(reply)]
        if not trained:
            return
        own_soc = {node: soc for soc, node in enumerate(sorted(self._grid.get_node_ids()))}
        for reply in trained:
            report = _report_of(reply)
            if UNKNOWN not in report.devices:
                self.arithmetics.add(report.arithmetic)
            socs = report.socs or (own_soc.get(reply.metadata.src_node_id, -1),)
            self._device_of |= dict(zip(socs, report.devices, strict=False))


def _has_trained(reply: Message) -> bool:
    if not reply.has_content() or not reply.metadata.message_type.startswith("train"):
        return False
    if NUM_EXAMPLES in reply.content.metric_records.get(METRICS, {}):
        return True
    return legacy_api.num_examples_of(reply) is not None


def _report_of(reply: Message) -> DeviceReport:
    try:
        return decode(DeviceReport, reply.content.config_records[TRAINED_ON], "device")
    except (KeyError, ConfigError, TypeError):
        return DeviceReport(devices=(UNKNOWN,))
