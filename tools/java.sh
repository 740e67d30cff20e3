#!/bin/sh
# java.sh PYTHON: see that Spark finds Java, as Sava looks for it; install Debian's headless JRE when that is possible; else say what to do.
# Never fails the set-up: everything but Spark, pipelines and replication works without Java.
set -u

find_java() {
    "$1" -c '
import os, sys
from sava.pipeline.launch import SparkMissing, find_java
try:
    home = find_java(os.environ)
except SparkMissing as error:
    sys.exit(f"java: {error}")
print(f"java: {home}")
'
}

find_java "$1" 2>/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "java: none that Spark can use; installing default-jre-headless ..."
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >/dev/null 2>&1  # what is known of packages may be new enough
    apt-get install -y -qq default-jre-headless >/dev/null || echo "java: it could not be installed"
fi
find_java "$1" 2>&1 || true
