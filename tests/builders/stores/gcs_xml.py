"""Google's storage-testbench with the rest of the XML API that clients of object stores use.

The rest is: listing, deletion, multipart uploads, and the headers and bodies of answers. The testbench's own Python
serves `application`. The formats follow https://cloud.google.com/storage/docs/xml-api/reference-methods. Objects,
generations and preconditions are the testbench's own, and so are the faults that it is told to make (`/retry_test`),
which affect the next requests.
"""

import itertools
import json
import uuid
from email.utils import format_datetime
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import flask
import gcs.object
import testbench.common as common
from testbench import rest_server

PAGE = 10
"""Number of objects in one answer to a listing; Google's has 1000."""
CODES = {
    401: "AuthenticationRequired",
    403: "AccessDenied",
    404: "NoSuchKey",
    412: "PreconditionFailed",
    416: "InvalidRange",
    429: "TooManyRequests",
    503: "ServiceUnavailable",
}
database, retry_test = rest_server.db, rest_server.retry_test
uploads = {}
"""Parts by number, for each upload that was begun."""


@retry_test("storage.objects.list")
def listed(bucket, name):
    items, _ = database.list_object(flask.request, bucket, None)
    after = flask.request.args.get("continuation-token", "")
    left = [item for item in items if item.name > after]
    page = left[:PAGE]
    contents = "".join(
        f"<Contents><Key>{escape(item.name)}</Key><Generation>{item.generation}</Generation><Size>{item.size}</Size>"
        f"<LastModified>{item.update_time.ToJsonString()}</LastModified><ETag>{etag(item)}</ETag></Contents>"
        for item in page
    )
    more = f"<NextContinuationToken>{escape(page[-1].name)}</NextContinuationToken>" if len(left) > PAGE else ""
    return answer(f"<ListBucketResult><Name>{bucket}</Name>{contents}{more}</ListBucketResult>")


@retry_test("storage.objects.get")
def got(bucket, name):
    preconditions = common.make_xml_preconditions(flask.request)
    blob = database.get_object(bucket, name, flask.request.args.get("generation"), preconditions=preconditions)
    response = blob.rest_media(common.FakeRequest.init_xml(flask.request))
    response.headers["ETag"] = etag(blob.metadata)
    response.headers["Last-Modified"] = format_datetime(blob.metadata.update_time.ToDatetime()).replace("-0000", "GMT")
    return response


@retry_test("storage.objects.insert")
def put(bucket, name):
    blob, _ = gcs.object.Object.init_xml(flask.request, database.get_bucket(bucket, None).metadata, name)
    return inserted(blob, "")


@retry_test("storage.objects.insert")
def begun(bucket, name):
    database.get_bucket(bucket, None)
    id = uuid.uuid4().hex
    uploads[id] = {}
    return answer(f"<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>")


@retry_test("storage.objects.insert")
def part(bucket, name):
    number, content = int(flask.request.args["partNumber"]), common.extract_media(flask.request)
    uploads[flask.request.args["uploadId"]][number] = content
    return flask.Response(headers={"ETag": f'"part-{number}-{len(content)}"'})


@retry_test("storage.objects.insert")
def completed(bucket, name):
    parts = uploads.pop(flask.request.args["uploadId"])
    asked = ElementTree.fromstring(flask.request.get_data())
    content = b"".join(parts[int(number.text)] for number in asked.iter("PartNumber"))
    request = common.FakeRequest(args={}, headers={})
    metadata = {"bucket": bucket, "name": name, "metadata": {}}
    blob, _ = gcs.object.Object.init_dict(request, metadata, content, database.get_bucket(bucket, None).metadata, False)
    tag = escape(etag(blob.metadata))
    return inserted(blob, f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>")


def inserted(blob, body):
    name = blob.metadata.name
    preconditions = common.make_xml_preconditions(flask.request)
    database.insert_object(blob.bucket.name.rpartition("/")[2], blob, None, preconditions)
    headers = {"ETag": etag(blob.metadata), "x-goog-generation": blob.metadata.generation, "x-goog-name": name}
    return answer(body, headers)


@retry_test("storage.objects.delete")
def deleted(bucket, name):
    database.delete_object(bucket, name)
    return flask.Response(status=204)


def given_up(bucket, name):
    uploads.pop(flask.request.args["uploadId"], None)
    return flask.Response(status=204)


HANDLERS = {
    ("GET", "list-type"): listed,
    ("GET", ""): got,
    ("HEAD", ""): got,
    ("PUT", "partNumber"): part,
    ("PUT", ""): put,
    ("POST", "uploads"): begun,
    ("POST", "uploadId"): completed,
    ("DELETE", "uploadId"): given_up,
    ("DELETE", ""): deleted,
}
"""Handlers by method, and by a parameter of the query."""


@rest_server.root.before_request
def handled():
    """Return the answer to a request, or None if the testbench itself handles it."""
    bucket, _, name = flask.request.path.lstrip("/").partition("/")
    query = next((key for key in ("list-type", "uploads", "partNumber", "uploadId") if key in flask.request.args), "")
    if not bucket or bucket.startswith("retry_test") or not (name or query):
        return None
    return HANDLERS[flask.request.method, query](bucket, name)


@rest_server.root.after_request
def as_xml(response):
    """Return an error as Google's XML API writes it; a range that the testbench cuts off stays a range."""
    if response.status_code == 200 and "Range" in flask.request.headers and "Content-Range" in response.headers:
        response.status_code = 206
    if response.status_code < 400 or not response.is_json:
        return response
    text = json.dumps(response.get_json())
    code = "NoSuchBucket" if "Bucket " in text and response.status_code == 404 else CODES.get(response.status_code)
    return answer(f"<Error><Code>{code or 'InternalError'}</Code></Error>", status=response.status_code)


def answer(body, headers=None, status=200):
    text = f"<?xml version='1.0' encoding='UTF-8'?>{body}" if body else ""
    return flask.Response(text, status, headers, content_type="application/xml; charset=UTF-8")


def etag(metadata):
    return f'"{metadata.checksums.md5_hash.hex()}"'


def faulty(application):
    """Wrap the application, so that a request that names no fault gets the first one that has not occurred yet.

    Clients of object stores can't send the header that names a fault.
    """

    def call(environ, start_response):
        due = itertools.chain((test["id"] for test in database.list_retry_tests() if not test["completed"]), [""])
        environ.setdefault("HTTP_X_RETRY_TEST_ID", next(due))
        return application(environ, start_response)

    return call


application = faulty(rest_server.server)
