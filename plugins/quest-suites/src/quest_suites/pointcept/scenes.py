"""Generated lidar-like scenes of streets with nuScenes' 16 classes, for benchmarks and tests without a download.

A sensor 1.8 m above a street sends rays in rings; each ray ends at the first thing it meets. Things are boxes, upright
cylinders and balls in the sizes that the classes have in the world. The task is hard because every class has a similar
one (car and truck, driveable surface and sidewalk, pedestrian and traffic cone) with a similar reflection, and only the
context separates them (a sidewalk lies between street and buildings).

Synthetic data; numbers are not comparable with nuScenes. Its noise is jitter of two centimeters and lost returns.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

CLASSES = (
    "barrier", "bicycle", "bus", "car", "construction_vehicle", "motorcycle", "pedestrian", "traffic_cone", "trailer",
    "truck", "driveable_surface", "other_flat", "sidewalk", "terrain", "manmade", "vegetation",
)  # fmt: skip
"""nuScenes' classes, in the order of its labels."""

SENSOR_HEIGHT = 1.8
RANGE = 50.0


class Scan(NamedTuple):
    """One turn of the sensor."""

    points: np.ndarray  # [N, 3] float32, meters, the sensor at the origin
    strength: np.ndarray  # [N] float32, reflected intensity in [0, 1]
    labels: np.ndarray  # [N] int64, indices of CLASSES


class _Things(NamedTuple):
    """Boxes and cylinders of a scene, one row each."""

    center: np.ndarray  # [n, 3], the middle
    half: np.ndarray  # [n, 3], half of the extents; for a cylinder (radius, radius, half height)
    yaw: np.ndarray  # [n]
    round: np.ndarray  # [n], True for cylinders
    label: np.ndarray  # [n]


# class -> (length, width, height) in meters, their relative spread, and the most that a scene has
_VEHICLES = {
    "car": ((4.6, 1.9, 1.7), 0.10, 9),
    "truck": ((7.5, 2.5, 2.9), 0.15, 3),
    "bus": ((11.5, 2.9, 3.4), 0.05, 2),
    "trailer": ((11.0, 2.5, 3.6), 0.10, 2),
    "construction_vehicle": ((6.0, 2.7, 3.0), 0.20, 2),
    "motorcycle": ((2.1, 0.8, 1.4), 0.10, 3),
    "bicycle": ((1.7, 0.6, 1.2), 0.10, 4),
}
_REFLECTS = {
    "barrier": 0.45, "bicycle": 0.30, "bus": 0.50, "car": 0.45, "construction_vehicle": 0.45, "motorcycle": 0.30,
    "pedestrian": 0.25, "traffic_cone": 0.60, "trailer": 0.50, "truck": 0.45, "driveable_surface": 0.10,
    "other_flat": 0.18, "sidewalk": 0.20, "terrain": 0.25, "manmade": 0.30, "vegetation": 0.25,
}  # fmt: skip


def scan(seed: int, *, rings: int = 32, rays: int = 240) -> Scan:
    """Return the scan of the scene of a seed, by `rings` of different elevation with `rays` each."""
    random = np.random.default_rng(seed)
    street = random.uniform(4.5, 8.0)  # half of its width
    walk = random.uniform(1.5, 3.5)  # the sidewalk's width
    turn = random.uniform(-math.pi, math.pi)  # the street's direction
    things = _furnish(random, street, walk)

    elevation = np.radians(np.linspace(-28.0, 10.0, rings))[:, None] + random.normal(0, 2e-4, (rings, rays))
    azimuth = np.linspace(0, 2 * math.pi, rays, endpoint=False)[None] + np.zeros((rings, 1))
    ray = np.stack(
        [np.cos(elevation) * np.cos(azimuth), np.cos(elevation) * np.sin(azimuth), np.sin(elevation)], axis=-1
    ).reshape(-1, 3)  # [R, 3]
    ray = ray.astype(np.float32)

    with np.errstate(divide="ignore", invalid="ignore"):
        ground = np.where(ray[:, 2] < 0, -SENSOR_HEIGHT / ray[:, 2], np.inf)  # [R]
        reach = np.concatenate([ground[:, None], _distances(ray, things)], axis=1)  # [R, 1 + n]
    first = reach.argmin(1)
    distance = reach[np.arange(len(ray)), first]
    # Leaves let rays through and some returns are lost, more of them far away.
    seen = (distance < RANGE) & (random.uniform(size=len(ray)) > 0.05 + 0.3 * np.minimum(distance / RANGE, 1) ** 2)
    ray, first, distance = ray[seen], first[seen], distance[seen]
    points = ray * (distance + random.normal(0, 0.02, len(ray)))[:, None]

    labels = np.concatenate([[-1], things.label])[first]
    labels = np.where(first == 0, _ground_class(points, street, walk), labels)
    green = labels == CLASSES.index("vegetation")
    points[green] += random.normal(0, 0.25, (int(green.sum()), 3))

    reflects = np.array([_REFLECTS[name] for name in CLASSES])[labels]
    facing = 0.6 + 0.4 * np.abs(ray[:, 2])
    strength = np.clip(reflects * facing + random.normal(0, 0.08, len(labels)), 0, 1)
    cos, sin = math.cos(turn), math.sin(turn)
    points = points @ np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    return Scan(points.astype(np.float32), strength.astype(np.float32), labels.astype(np.int64))


def _furnish(random: np.random.Generator, street: float, walk: float) -> _Things:
    """Return the things on a street along x, whose sidewalks begin at |y| = `street` and are `walk` wide."""
    rows: list[tuple[Any, ...]] = []

    def put(
        name: str, x: float, y: float, size: Sequence[float], yaw: float = 0.0, above: float = 0.0, round: bool = False
    ) -> None:
        half = tuple(extent / 2 for extent in size)  # of length, width and height
        rows.append(((x, y, above + half[2] - SENSOR_HEIGHT), half, yaw, round, CLASSES.index(name)))

    def along() -> float:
        far = random.uniform(5.0, 38.0)  # away from the sensor
        return float(far if random.uniform() < 0.5 else -far)

    def side() -> int:
        return 1 if random.uniform() < 0.5 else -1

    # on the street
    for name, (usual, spread, most) in _VEHICLES.items():
        for _ in range(random.integers(1, most + 1)):
            size = tuple(extent * (1 + spread * random.normal()) for extent in usual)
            two_wheels = name in ("bicycle", "motorcycle")
            lane = (street - 0.7) if two_wheels else random.uniform(0.3, 0.75) * street
            x, y = along(), side() * lane
            if name == "truck":  # a cab and, behind it, a taller load
                put(name, x, y, (size[0] * 0.28, size[1], size[2] * 0.8))
                put(name, x - size[0] * 0.6, y, (size[0] * 0.7, size[1], size[2]))
            elif name == "construction_vehicle":  # a body and an arm
                put(name, x, y, size)
                put(name, x + size[0] * 0.6, y, (size[0] * 0.7, 0.5, 0.5), above=size[2])
            elif name == "car":  # a body and a cabin
                put(name, x, y, (size[0], size[1], size[2] * 0.55))
                put(name, x - 0.2, y, (size[0] * 0.55, size[1] * 0.9, size[2] * 0.45), above=size[2] * 0.55)
            else:
                put(name, x, y, size, yaw=random.normal(0, 0.05))
            if two_wheels and random.uniform() < 0.5:  # a rider has its vehicle's class, as in nuScenes
                put(name, x, y, (0.5, 0.5, 0.8), above=size[2] * 0.7, round=True)

    # pedestrians on the sidewalks, and a row each of cones and barriers
    for _ in range(random.integers(3, 12)):
        near = street + random.uniform(0.2, walk)
        put("pedestrian", along(), side() * near, (0.55, 0.55, random.normal(1.72, 0.08)), round=True)
    x, y = along(), side() * random.uniform(0.2, 0.8) * street
    for i in range(random.integers(3, 9)):
        put("traffic_cone", x + 1.5 * i, y, (0.38, 0.38, random.normal(0.75, 0.06)), round=True)
    x, y = along(), side() * (street + 0.1)
    for i in range(random.integers(2, 7)):
        put("barrier", x + 2.0 * i, y, (1.9, 0.5, random.normal(1.0, 0.05)))
    # beyond the sidewalks, stretch by stretch: a building or trees
    for where in (-1, 1):
        edge = street + walk
        x = -45.0
        while x < 45.0:
            length = random.uniform(6.0, 18.0)
            if random.uniform() < 0.6:
                depth = random.uniform(6.0, 12.0)
                gap = random.uniform(0.5, 8.0)
                put("manmade", x + length / 2, where * (edge + gap + depth / 2), (length, depth, random.uniform(4, 15)))
            else:
                for _ in range(random.integers(1, 4)):
                    crown = random.uniform(1.5, 4.0)
                    place = (x + random.uniform(0, length), where * (edge + random.uniform(1.0, 6.0)))
                    put("vegetation", *place, (0.4, 0.4, 2.5), round=True)
                    put("vegetation", *place, (crown, crown, random.uniform(2.0, 4.0)), above=2.2, round=True)
            x += length
        for _ in range(random.integers(0, 4)):  # poles stand where pedestrians do
            put("manmade", along(), where * (street + 0.4), (0.25, 0.25, random.uniform(4.0, 7.0)), round=True)
    center, half, yaw, is_round, label = zip(*rows, strict=True)
    return _Things(
        np.array(center, np.float32),
        np.array(half, np.float32),
        np.array(yaw, np.float32),
        np.array(is_round),
        np.array(label),
    )


def _ground_class(points: np.ndarray, street: float, walk: float) -> np.ndarray:
    """Return the class of points on the ground: street, sidewalk, terrain outside them, and islands in the street."""
    y = np.abs(points[:, 1])
    label = np.where(y < street, CLASSES.index("driveable_surface"), CLASSES.index("terrain"))
    label = np.where((y >= street) & (y < street + walk), CLASSES.index("sidewalk"), label)
    island = (y < 0.12 * street) & (np.abs(points[:, 0]) > 12)  # the street's middle, away from the sensor
    return np.where(island, CLASSES.index("other_flat"), label)


def _distances(ray: np.ndarray, things: _Things) -> np.ndarray:
    """Return the distances at which rays from the origin hit things: [R, n], inf without a hit."""
    cos, sin = np.cos(things.yaw), np.sin(things.yaw)

    def turn(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        """Return points in the axes of each thing."""
        return np.stack([x * cos + y * sin, y * cos - x * sin, z], axis=-1)

    turned = turn(ray[:, 0, None], ray[:, 1, None], np.broadcast_to(ray[:, 2, None], (len(ray), len(cos))))  # [R, n, 3]
    center = turn(*things.center.T)  # [n, 3]
    one, two = (center - things.half) / turned, (center + things.half) / turned  # distances to the slabs
    enter, leave = np.minimum(one, two), np.maximum(one, two)  # [R, n, 3]
    start, end = enter.max(2), leave.min(2)
    # A ray hits a cylinder if its horizontal part comes within the radius.
    flat = (turned[..., :2] ** 2).sum(2)
    middle = (turned[..., :2] * center[:, :2]).sum(2) / flat
    away = (center[:, :2] ** 2).sum(1) - middle**2 * flat
    depth = np.sqrt(np.maximum(things.half[:, 0] ** 2 - away, 0) / flat)
    round_start = np.maximum(middle - depth, enter[..., 2])
    round_end = np.where(away < things.half[:, 0] ** 2, np.minimum(middle + depth, leave[..., 2]), -np.inf)
    start, end = np.where(things.round, round_start, start), np.where(things.round, round_end, end)
    return np.where((start <= end) & (start > 0.5), start, np.inf)


def seeds(split: str, count: int) -> range:
    """Return the seeds of a split, "train" or "val"; the splits do not overlap."""
    first = {"train": 0, "val": 1_000_000}[split]
    return range(first, first + count)
