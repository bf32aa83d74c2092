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


def test_frame_and_gap(tmp_path):
    """A framed cell shows the frame's red, and a gap adds white between columns."""

    def pixels(name, **options):
        heat_map(tmp_path / name, [[1.0, 2.0, 1.5]], ["a"], ["x", "y", "mean"], "t", **options)
        return (matplotlib.image.imread(tmp_path / name)[..., :3] * 255).astype(int).reshape(-1, 3)

    plain, marked = pixels("plain.png"), pixels("marked.png", gap_before=2, framed={(0, 1)})
    red, white = (196, 78, 82), (255, 255, 255)
    assert (plain == red).all(1).sum() == 0 < (marked == red).all(1).sum()
    assert (marked == white).all(1).sum() > (plain == white).all(1).sum()
    first = [(picture == (68, 1, 84)).all(1).sum() for picture in (plain, marked)]
    assert first[0] * 0.95 < first[1], "the cell far from both is as it was"
