#!/bin/sh
# Find Java 17 or newer (Spark needs it); install Debian's headless JRE when that is possible; else say what to do.
# Never fails the set-up: everything but the Spark pipeline works without Java.
set -u

version() {  # major version of the given java, or 0
    "$1" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1 | grep . || echo 0
}

for java in "${JAVA_HOME:-/nonexistent}/bin/java" "$(command -v java || true)"; do
    if [ -x "$java" ] && [ "$(version "$java")" -ge 17 ]; then
        echo "java: $java ($(version "$java"))"
        exit 0
    fi
done

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "java: none of version 17 or newer found; installing default-jre-headless"
    if { apt-get update -qq && apt-get install -y -qq default-jre-headless; } >/dev/null 2>&1; then
        echo "java: $(command -v java) ($(version java))"
        exit 0
    fi
fi
echo "java: version 17 or newer not found; install one (Debian: apt-get install default-jre-headless) to use the Spark pipeline"
