"""Events from a Kafka topic, one JSON object per message; the trainer's commit is the only record of offsets."""

from __future__ import annotations

from typing import Any

from lpfs._imports import import_optional
from lpfs.errors import DataError
from lpfs.online.source import Event, parse_event

POLL_SECONDS = 0.1  # a poll waits so long for as many events as were asked for
REQUEST_SECONDS = 20.0


class KafkaSource:
    """All partitions of a topic, by ``assign`` and ``seek``, without a consumer group.

    The order of events is that of their partition; between partitions Kafka does not define one. If retention has
    deleted events after the position, DataError is raised instead of a jump to the ones that are left.

    Args:
        servers: bootstrap servers, ``host:port,…``.
        topic: the topic.
        config: further settings of librdkafka, for example for TLS.
    """

    def __init__(self, servers: str, topic: str, config: dict[str, Any] | None = None) -> None:
        self._kafka = import_optional("confluent_kafka", "kafka", "the Kafka source")
        self.topic, self._name = topic, f"Kafka topic {topic!r}"
        fixed = {"group.id": "lpfs", "enable.auto.commit": False, "auto.offset.reset": "error"}
        self._consumer = self._kafka.Consumer({"bootstrap.servers": servers, **(config or {}), **fixed})
        self._offsets: dict[int, int] = {}  # next offset of each partition

    def poll(self, max_rows: int) -> list[Event]:
        """Return the next events; waits up to ``POLL_SECONDS`` for them."""
        events, codes = [], self._kafka.KafkaError
        for message in self._consumer.consume(max_rows, POLL_SECONDS):
            if (error := message.error()) is not None:
                if error.code() in (codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE):
                    raise DataError(f"{self._name}, {message.partition()}: events after the last commit were deleted")
                if error.retriable() or error.code() == codes._ALL_BROKERS_DOWN:
                    continue
                raise DataError(f"{self._name}: {error.str()}")
            partition, offset = message.partition(), message.offset()
            if offset > self._offsets[partition]:  # a gap: of a compacted topic or a transaction, or deleted events
                self._check_available(partition, self._offsets[partition])
            self._offsets[partition] = offset + 1
            events.append(parse_event(message.value() or b""))
        return events

    def position(self) -> Any:
        """Return the next offset of each partition."""
        return {str(partition): offset for partition, offset in sorted(self._offsets.items())}

    def seek(self, position: Any) -> None:
        """Continue at these offsets; new partitions, and all of them without a position, start at their beginning."""
        try:
            topic = self._consumer.list_topics(self.topic, REQUEST_SECONDS).topics[self.topic]
        except self._kafka.KafkaException as error:
            raise DataError(f"{self._name} cannot be read: {error}") from error
        if topic.error is not None:
            raise DataError(f"{self._name} cannot be read: {topic.error.str()}")
        offsets = {int(partition): offset for partition, offset in (position or {}).items()}
        if missing := sorted(set(offsets) - set(topic.partitions)):
            raise DataError(f"{self._name} no longer has the partition {missing[0]}")
        for partition in topic.partitions:
            if partition in offsets:
                self._check_available(partition, offsets[partition])
            else:
                offsets[partition] = self._limits(partition)[0]
        self._offsets = offsets
        part = self._kafka.TopicPartition
        self._consumer.assign([part(self.topic, partition, offset) for partition, offset in offsets.items()])

    def _limits(self, partition: int) -> tuple[int, int]:
        """Return the first offset of a partition and the one after the last."""
        part = self._kafka.TopicPartition(self.topic, partition)
        try:
            low, high = self._consumer.get_watermark_offsets(part, REQUEST_SECONDS)
        except (self._kafka.KafkaException, TypeError) as error:
            raise DataError(f"{self._name}, {partition}: its offsets cannot be read: {error}") from error
        return low, high

    def _check_available(self, partition: int, offset: int) -> None:
        low, high = self._limits(partition)
        if not low <= offset <= high:
            raise DataError(
                f"{self._name}, {partition}: offset {offset} of the last commit is not available, only {low} to "
                f"{high}; raise the retention, or start another run"
            )

    def lag(self) -> int | None:
        """Return the number of events after the position, as far as the client knows."""
        part, total = self._kafka.TopicPartition, 0
        for partition, offset in self._offsets.items():
            _, high = self._consumer.get_watermark_offsets(part(self.topic, partition), cached=True)
            total += max(0, high - offset)
        return total

    def close(self) -> None:
        """Close the connection."""
        self._consumer.close()
