/* What a network does to connections, on demand. */
#define _GNU_SOURCE
#include "soft_stream.h"

#include <sys/socket.h>

#include "soft.h"

/* Under progress. */
static bool concerns(const struct soft_stream *stream, const union ibv_gid *peer)
{
    return !peer || soft_stream_is_from(stream, peer) ||
           (stream->is_link && soft_link_is_to(container_of(stream, struct soft_link, stream), peer));
}

unsigned int soft_fabric_cut(struct soft_device *device, const union ibv_gid *peer)
{
    struct soft_fabric *fabric = device->fabric;
    struct soft_stream *stream;
    unsigned int count = 0;

    pthread_mutex_lock(&fabric->progress);
    for (stream = fabric->streams; stream; stream = stream->next) {
        if (!concerns(stream, peer))
            continue;
        pthread_mutex_lock(&stream->tx);
        shutdown(stream->watch.fd, SHUT_RDWR); /* who reads finds it */
        stream->broken = true;
        pthread_mutex_unlock(&stream->tx);
        count++;
    }
    pthread_mutex_unlock(&fabric->progress);
    return count;
}

unsigned int soft_fabric_stall(struct soft_device *device, const union ibv_gid *peer, bool stall)
{
    struct soft_fabric *fabric = device->fabric;
    struct soft_stream *stream;
    unsigned int count = 0;

    pthread_mutex_lock(&fabric->progress);
    for (stream = fabric->streams; stream; stream = stream->next) {
        if (stream->stage != SOFT_OPEN || !concerns(stream, peer))
            continue;
        pthread_mutex_lock(&stream->tx);
        stream->stalled = stall;
        soft_stream_watch(stream);
        pthread_mutex_unlock(&stream->tx);
        count++;
    }
    pthread_mutex_unlock(&fabric->progress);
    return count;
}
