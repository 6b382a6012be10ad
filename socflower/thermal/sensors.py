"""All sources of readings: this machine's sensors, a recording, a simulated SoC; one interface, `HeatSource`.

A sensor that lies (no number, −128 °C, stuck, missing, closed) is left out with one note and taken back when it makes
sense again; `read` of none of them raises.
"""

from socflower.thermal.linux_sensors import LinuxSensors, SensorsFound, TemperatureSensor
from socflower.thermal.reading import HeatSource, Reading
from socflower.thermal.recorded_source import RecordedSource, Recorder, record
from socflower.thermal.sensor_names import SensorKind
from socflower.thermal.simulated_source import SensorFault, SimulatedSource

__all__ = ["HeatSource", "LinuxSensors", "Reading", "RecordedSource", "Recorder", "SensorFault", "SensorKind",
           "SensorsFound", "SimulatedSource", "TemperatureSensor", "record"]
