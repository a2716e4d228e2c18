"""Which columns of a table matter? The gates as a step of a scikit-learn pipeline.

    python examples/sklearn_pipeline.py

Of 12 columns four decide about y: two of them only together (their product), one by its size alone. A test of one
column at a time cannot see these three.
"""

from __future__ import annotations

import numpy as np
from sklearn.feature_selection import SelectKBest, f_regression  # type: ignore[import-untyped]
from sklearn.model_selection import GridSearchCV, cross_val_score  # type: ignore[import-untyped]
from sklearn.neighbors import KNeighborsRegressor  # type: ignore[import-untyped]
from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]

from lpfs.sklearn.selector import PolarizingSelector

TRUE = [0, 1, 2, 3]


def main() -> None:
    random = np.random.default_rng(0)
    table = random.normal(size=(800, 12))
    y = table[:, 0] * table[:, 1] + np.abs(table[:, 2]) + table[:, 3] + 0.3 * random.normal(size=800)

    gates = PolarizingSelector(keep=4, steps=400, random_state=0)
    rival = SelectKBest(f_regression, k=4)
    for name, selector in [("PolarizingSelector", gates), ("SelectKBest", rival)]:
        kept = selector.fit(table, y).get_support(indices=True).tolist()
        score = cross_val_score(make_pipeline(selector, KNeighborsRegressor(8)), table, y, cv=3).mean()
        print(f"{name} kept {kept} (true {TRUE}); cross-validated R² {score:.3f}")

    pipeline = make_pipeline(gates, KNeighborsRegressor(8))
    grid = GridSearchCV(pipeline, {"polarizingselector__keep": [2, 4]}, cv=2).fit(table, y)
    print(f"a grid search over keep chose {grid.best_params_}, R² {grid.best_score_:.3f}")
    print(f"alive during the search: {[each['alive'] for each in gates.selection_.history]}")


if __name__ == "__main__":
    main()
