"""Preparation of embeddings by pyarrow: python with_pyarrow.py OUT FILE.parquet ...

Each row of the files has a list of vectors, `embedding`. Processes write the shards, and this process writes the
manifest.
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pyarrow
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from concertina_data.data_manifest import Field
from concertina_trainer.data.build.recipe import Recipe, TypedRecipe
from concertina_trainer.data.tables import write_manifest, write_table

WIDTH = 16
RECIPE = Recipe(typed=TypedRecipe.of("", 0, (Field("embedding", "float32", WIDTH),)))


def prepare(file: str, out: str) -> pyarrow.Table:
    table = parquet.read_table(file)
    long_enough = compute.greater(compute.list_value_length(table["embedding"]), 2)
    return write_table(table.filter(long_enough), out, RECIPE)


def main(out: str, files: list[str]) -> None:
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        shards = [row for table in pool.map(partial(prepare, out=out), files) for row in table.to_pylist()]
    manifest = write_manifest(shards, out, RECIPE)
    print(f"{out}: {manifest.documents:,} documents in {len(manifest.shards)} shards")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
