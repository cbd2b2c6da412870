{{- define "kvstore.needsKeys" -}}
{{- if or (include "kvstore.isShared" .) .Values.http.tokenSecret }}true{{ end -}}
{{- end -}}

{{- define "kvstore.ownsFolders" -}}
{{- if and (not (include "kvstore.isShared" .)) .Values.ownFolders }}true{{ end -}}
{{- end -}}

{{- define "kvstore.takesOver" -}}
{{- if and (not (include "kvstore.isShared" .)) .Values.takeOver }}true{{ end -}}
{{- end -}}

{{/* The pod, of a DaemonSet or a StatefulSet. */}}
{{- define "kvstore.pod" -}}
metadata:
  labels:
    {{- include "kvstore.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: kvstore
    {{- if .Values.restartOnChange }}
    checksum/config: {{ include "kvstore.config" . | sha256sum }}
    {{- end }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "kvstore.serviceAccount" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add 15 (ceil .Values.drainSeconds | int64) }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ int64 .Values.user }}
    runAsGroup: {{ int64 .Values.group }}
    fsGroup: {{ int64 .Values.group }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
    {{- with .Values.podSecurityContext }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if include "kvstore.ownsFolders" . }}
  initContainers:
    {{- include "kvstore.ownFolders" . | nindent 4 }}
  {{- end }}
  containers:
    - name: kvstore
      image: {{ include "kvstore.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [serve, --config, /etc/kvstore/server/kvstore.yaml{{ if include "kvstore.takesOver" . }}, --take-over, --wait-at-end{{ end }}]
      {{- with .Values.env }}
      env: {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - name: http
          containerPort: {{ int64 .Values.http.port }}
        {{- if include "kvstore.isShared" . }}
        - name: kvs
          containerPort: {{ int64 .Values.tcp.port }}
        {{- end }}
      startupProbe:
        httpGet: {path: /healthz, port: http}
        {{- toYaml .Values.startupProbe | nindent 8 }}
      livenessProbe:
        httpGet: {path: /healthz, port: http}
        {{- toYaml .Values.livenessProbe | nindent 8 }}
      readinessProbe:
        httpGet: {path: /readyz, port: http}
        {{- toYaml .Values.readinessProbe | nindent 8 }}
      resources:
        requests:
          cpu: {{ .Values.cpu | quote }}
          memory: {{ include "kvstore.memory" . }}
        limits:
          memory: {{ include "kvstore.memory" . }}
      securityContext: {{- include "kvstore.restricted" . | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/kvstore/server, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        - {name: sockets, mountPath: {{ eq .Values.kind "StatefulSet" | ternary "/run/kvstore" .Values.socketFolder }}}
        {{- if .Values.disk.enabled }}
        - {name: disk, mountPath: /mnt/kvstore}
        {{- end }}
        {{- if include "kvstore.needsKeys" . }}
        - {name: keys, mountPath: /run/secrets/kvstore, readOnly: true}
        {{- end }}
        {{- if include "kvstore.isShared" . }}
        - {name: clients, mountPath: /etc/kvstore/clients, readOnly: true}
        {{- end }}
  volumes:
    {{- include "kvstore.volumes" . | nindent 4 }}
{{- end -}}

{{/* kubelet makes a hostPath that belongs to root. Their paths here have no parents that are closed to root without its rights. */}}
{{- define "kvstore.ownFolders" -}}
- name: own-folders
  image: {{ include "kvstore.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    - install
    - -d
    - --mode=0700
    - --owner={{ int64 .Values.user }}
    - --group={{ int64 .Values.group }}
    - /own/sockets
    {{- if .Values.disk.enabled }}
    - /own/disk
    {{- end }}
  securityContext:
    runAsUser: 0
    runAsNonRoot: false
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      add: [CHOWN, FOWNER]
  volumeMounts:
    - {name: sockets, mountPath: /own/sockets}
    {{- if .Values.disk.enabled }}
    - {name: disk, mountPath: /own/disk}
    {{- end }}
{{- end -}}

{{- define "kvstore.volumes" -}}
- name: config
  configMap: {name: {{ include "kvstore.fullname" . }}}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
{{- if include "kvstore.isShared" . }}
- name: sockets
  emptyDir: {sizeLimit: 1Mi}
- name: clients
  {{- if .Values.tcp.clientsSecret }}
  secret: {secretName: {{ .Values.tcp.clientsSecret }}, defaultMode: 0440}
  {{- else }}
  configMap: {name: {{ .Values.tcp.clientsConfigMap }}}
  {{- end }}
{{- else }}
- name: sockets
  hostPath: {path: {{ .Values.socketFolder }}, type: DirectoryOrCreate}
{{- if .Values.disk.enabled }}
- name: disk
  hostPath: {path: {{ .Values.disk.hostPath }}, type: DirectoryOrCreate}
{{- end }}
{{- end }}
{{- if include "kvstore.needsKeys" . }}
# Files of root that the group may read, which kvstore accepts from root only.
- name: keys
  projected:
    defaultMode: 0440
    sources:
      {{- if include "kvstore.isShared" . }}
      - secret: {name: {{ .Values.tcp.serverKeySecret }}, items: [{key: server.key, path: server.key}]}
      {{- end }}
      {{- with .Values.http.tokenSecret }}
      - secret: {name: {{ . }}, items: [{key: token, path: token}]}
      {{- end }}
{{- end }}
{{- end -}}
