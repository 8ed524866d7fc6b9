"""Preparation of data by Ray Data: python with_ray.py OUT FILE.parquet ...

Ray's workers write the shards, and this process writes the manifest.
"""

import sys

import ray

from concertina_trainer.data.build.recipe import Recipe
from concertina_trainer.data.tables import write_manifest, write_table


def main(out: str, files: list[str]) -> None:
    recipe = Recipe(tokenizer="bytes", column="text")
    documents = ray.data.read_parquet(files).filter(lambda row: len(row["text"]) > 20)
    shards = documents.map_batches(
        write_table, batch_format="pyarrow", batch_size=None, fn_kwargs={"out": out, "recipe": recipe}
    )
    manifest = write_manifest(shards.take_all(), out, recipe)
    print(f"{out}: {manifest.documents:,} documents in {len(manifest.shards)} shards")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
