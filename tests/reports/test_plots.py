import matplotlib.image

from osprey_jax.reports.plots import heat_map


def test_cells_differ_by_value(tmp_path):
    """The file is a picture whose cells take the colours of their values, one without a value none."""
    path = tmp_path / "map.png"
    heat_map(path, [[1.0, 4.0], [None, 1.0]], ["osprey", "eagle"], ["code", "prose"], "accepted length")
    assert [p.name for p in tmp_path.iterdir()] == ["map.png"]
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).astype(int).reshape(-1, 3)
    purple, yellow = (pixels == (68, 1, 84)).all(1).sum(), (pixels == (253, 231, 36)).all(1).sum()
    assert purple > 1.5 * yellow > 0, "two low cells, one high one"


def test_one_value_everywhere(tmp_path):
    """No spread, or nothing at all, still makes a picture."""
    heat_map(tmp_path / "a.png", [[2.0, 2.0]], ["a"], ["x", "y"], "t")
    heat_map(tmp_path / "b.png", [[None, None]], ["a"], ["x", "y"], "t")
