/* Statistics of the fabric. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#include "soft/base/address.h"
#include "soft/base/lock_order.h"
#include "soft/base/util.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/stream.h"
#include "soft/objects/device.h"

static void format_address(const struct soft_fabric *fabric, char *text, size_t size)
{
    struct sockaddr_storage address;
    char host[INET6_ADDRSTRLEN] = "";

    if (fabric->tcp_watch.fd < 0 || !soft_gid_address(&fabric->device->gids[1], fabric->port, &address))
        return;
    if (address.ss_family == AF_INET)
        inet_ntop(AF_INET, &((struct sockaddr_in *)&address)->sin_addr, host, sizeof(host));
    else
        inet_ntop(AF_INET6, &((struct sockaddr_in6 *)&address)->sin6_addr, host, sizeof(host));
    snprintf(text, size, address.ss_family == AF_INET ? "%s:%u" : "[%s]:%u", host, fabric->port);
}

void soft_fabric_get_stats(struct soft_device *device, struct soft_fabric_stats *stats)
{
    struct soft_fabric *fabric = device->fabric;
    uint64_t first;

    soft_mutex_take(&fabric->setup);
    soft_mutex_take(&fabric->progress);
    *stats = fabric->stats;
    stats->streams = fabric->stream_count;
    stats->listening = fabric->listening;
    memcpy(stats->path, fabric->entry.names[0], sizeof(stats->path));
    format_address(fabric, stats->address, sizeof(stats->address));
    first = fabric->event_count > SOFT_FABRIC_EVENTS ? fabric->event_count - SOFT_FABRIC_EVENTS : 0;
    for (; first + stats->events < fabric->event_count; stats->events++)
        stats->event[stats->events] = fabric->stats.event[(first + stats->events) % SOFT_FABRIC_EVENTS];
    soft_mutex_give(&fabric->progress);
    soft_mutex_give(&fabric->setup);
}

static void stream_stats_fill(struct soft_stream *stream, struct soft_stream_stats *stats)
{
    memset(stats, 0, sizeof(*stats));
    memcpy(stats->own, &stream->fabric->device->gids[0], sizeof(stats->own));
    memcpy(stats->peer, stream->peer, sizeof(stats->peer));
    stats->is_link = stream->is_link;
    stats->connected = stream->stage == SOFT_OPEN;
    stats->is_unix = stream->is_unix;
    stats->direct = atomic_load(&stream->direct);
    stats->pid = stream->pid;
    stats->uid = stream->uid;
    memcpy(stats->why_not_direct, stream->why_not_direct, sizeof(stats->why_not_direct));
    stats->rings = soft_stream_uses_rings(stream);
    memcpy(stats->why_not_rings, stream->why_not_rings, sizeof(stats->why_not_rings));
    memcpy(stats->reason, stream->reason, sizeof(stats->reason));
    stats->frames_in = stream->frames_in;
    stats->bytes_in = stream->bytes_in;
    soft_mutex_take(&stream->tx);
    stats->frames_out = stream->frames_out;
    stats->bytes_out = stream->bytes_out;
    stats->connected_times = stream->connected_times;
    if (stream->is_link)
        stats->waiting = container_of(stream, struct soft_link, stream)->waiting;
    soft_mutex_give(&stream->tx);
}

/* Describe served streams while they exist, and links whether connected or not. */
size_t soft_fabric_get_streams(struct soft_device *device, struct soft_stream_stats *streams, size_t room)
{
    struct soft_fabric *fabric = device->fabric;
    struct soft_stream *stream;
    struct soft_link *link;
    size_t count = 0;
    unsigned int i;

    soft_mutex_take(&fabric->progress);
    for (stream = fabric->streams; stream; stream = stream->next)
        if (!stream->is_link && count++ < room)
            stream_stats_fill(stream, &streams[count - 1]);
    soft_mutex_take(&fabric->links);
    for (i = 0; i < sizeof(fabric->table) / sizeof(fabric->table[0]); i++)
        for (link = fabric->table[i]; link; link = link->next)
            if (count++ < room)
                stream_stats_fill(&link->stream, &streams[count - 1]);
    soft_mutex_give(&fabric->links);
    soft_mutex_give(&fabric->progress);
    return count;
}
